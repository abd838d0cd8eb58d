"""What the project's developers run, and users do not: foreign code against GleanRL."""
