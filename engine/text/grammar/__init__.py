"""Grammars: GBNF and JSON schemas in, sets of allowed tokens out."""
