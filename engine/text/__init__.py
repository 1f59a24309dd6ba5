"""Tokenizers, streaming text, chat templates."""
