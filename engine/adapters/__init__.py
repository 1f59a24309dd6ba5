"""LoRA adapters: their files, what is loaded, and the set under which a request runs."""
