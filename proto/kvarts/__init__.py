"""Kvarts' contracts. `kvarts.v1` holds the stubs that installing generates from the .proto files."""
