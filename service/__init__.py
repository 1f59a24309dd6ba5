"""The gRPC service: asyncio and grpc around the engine thread."""
