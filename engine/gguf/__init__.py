"""Bytes in: GGUF files, block formats, weights into the arena, tokenizer tables."""
