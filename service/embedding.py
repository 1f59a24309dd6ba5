"""EmbeddingService: this build has no embedding models and says so by name."""

from __future__ import annotations

import grpc
from kvarts.v1 import embedding_pb2, embedding_pb2_grpc

from engine.errors import NotSupported
from service.bridge import Bridge
from service.validate import check_embed, limits_of

EmbedRequest = embedding_pb2.EmbedRequest
EmbedResponse = embedding_pb2.EmbedResponse


class EmbeddingServicer(embedding_pb2_grpc.EmbeddingServiceServicer):
    """Checks requests as it will when it can serve them."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    async def Embed(
        self,
        request: EmbedRequest,
        context: grpc.aio.ServicerContext[EmbedRequest, EmbedResponse],
    ) -> EmbedResponse:
        """Refuses.

        Raises:
            EngineError: A field is bad; else NotSupported.
        """
        check_embed(request, limits_of(self._bridge.model))
        raise NotSupported("embeddings")
