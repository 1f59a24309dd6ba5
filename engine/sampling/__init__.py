"""Logits to tokens: llama.cpp's sampler chain on the host."""
