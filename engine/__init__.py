"""The engine: JAX and numpy. It knows no gRPC, asyncio, HTTP or protobuf."""
