"""Words of the library: protocols, messages, errors, options, keys, layout, and two small tools."""
