"""Seeded requests of every kind that generates, and what their two shapes of answer say."""
