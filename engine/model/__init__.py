"""From architecture tables to pure functions over arrays."""
