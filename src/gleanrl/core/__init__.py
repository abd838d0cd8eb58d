"""Words of the library: protocols, messages, errors, options, keys, layout. No behaviour."""
