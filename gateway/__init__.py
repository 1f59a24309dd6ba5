"""The REST gateway: llama.cpp's HTTP contract over the stubs alone."""
