"""Version 1 of the contracts: one `*_pb2` and one `*_pb2_grpc` module per .proto file beside this one."""
