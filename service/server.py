"""The service as a process sees it: doors, health, loading, serving, stopping.

Health is answered from the first moment: "" says that the process is alive,
`kvarts.v1.GenerationService` that it can generate. All other calls answer MODEL_LOADING until the
model is there. It must not know what a servicer does.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from kvarts.v1 import (
    embedding_pb2,
    embedding_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    lora_pb2,
    lora_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    rebuild_pb2,
    rebuild_pb2_grpc,
    slot_pb2,
    slot_pb2_grpc,
    tokenization_pb2,
    tokenization_pb2_grpc,
)

from engine.errors import EngineError
from engine.memory.allocator import trim
from engine.rebuild import RebuildState
from engine.slots.store import SlotStore
from engine.types import EventSink
from service.autosave import Autosaves
from service.bridge import Bridge, BridgeHooks
from service.call_groups import PATIENCE_S, CallGroups
from service.certificates import ServerCertificates
from service.channel_options import channel_options
from service.disk_metrics import SlotDiskCollector
from service.embedding import EmbeddingServicer
from service.fetch.errors import FetchError
from service.generation import GenerationServicer
from service.idle_slots import IdleSlotLog
from service.interceptors import Auth, Fence, Telemetry
from service.keys import KeyRing
from service.loaded import LoadedModel, LoadModel
from service.loop_lag import watch_loop_lag
from service.lora import LoraServicer
from service.memory_watch import watch_memory
from service.metrics import Metrics, MetricsServer
from service.model import ModelServicer
from service.model_loader import ModelLoader
from service.open_calls import OpenCalls
from service.options import ServiceOptions
from service.rebuild import RebuildServicer
from service.reload import Reloads
from service.slots import SlotServicer
from service.swap import ModelSwap, SwapHooks
from service.telemetry import Spans
from service.tls_files import BadCertificates
from service.tokenization import TokenizationServicer
from service.vllm_metrics import VllmCollector
from service.waiting_room import WaitingRoom

READY_SERVICE = "kvarts.v1.GenerationService"
# A reader whose window stays closed for this long is given up.
STALL_LIMIT_S = 30.0
# Kept of the shutdown timeout for the last answers to leave.
_FLUSH_S = 0.5
# Of the time for running requests, what the slots' saves get with --slot-autosave.
_SAVE_SHARE = 0.5

# A collection every few requests, where Python's own 700 means several within each.
_COLLECT_AFTER = 10_000

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICES = (
    embedding_pb2.DESCRIPTOR.services_by_name["EmbeddingService"],
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
    lora_pb2.DESCRIPTOR.services_by_name["LoraService"],
    model_pb2.DESCRIPTOR.services_by_name["ModelService"],
    rebuild_pb2.DESCRIPTOR.services_by_name["RebuildService"],
    slot_pb2.DESCRIPTOR.services_by_name["SlotService"],
    tokenization_pb2.DESCRIPTOR.services_by_name["TokenizationService"],
)

_LOG = logging.getLogger("kvarts.service")


class BindError(Exception):
    """An address cannot be listened on; the message names it."""


class Server:
    """One gRPC server; made, used and stopped on one event loop."""

    def __init__(
        self,
        options: ServiceOptions,
        *,
        stall_limit_s: float = STALL_LIMIT_S,
        group_patience_s: float = PATIENCE_S,
        spans: Spans | None = None,
        make_loader: Callable[[], ModelLoader] | None = None,
    ) -> None:
        """`spans` and `make_loader` instead of those that the options ask for are for tests."""
        self._options = options
        self._group_patience_s = group_patience_s
        self._metrics = Metrics()
        if options.slot_save_path is not None:
            self._metrics.add(SlotDiskCollector(options.slot_save_path))
        # The package's asyncio half has no types.
        self._health: Any = cast("Any", health).aio.HealthServicer()
        engine = options.engine
        self.waiting_room = WaitingRoom(
            max_calls=engine.queue_requests, max_bytes=engine.queue_bytes
        )
        self._bridge = Bridge(
            BridgeHooks(on_cancelled=self._metrics.count_cancelled, on_fault=self._on_fault),
            self.waiting_room,
        )
        self._autosaves = Autosaves()
        hooks = SwapHooks(
            self._set_ready,
            self._on_served,
            self._autosaves.leave,
            self._on_gone,
            self._report_death,
        )
        self._swap = ModelSwap(
            self._bridge,
            self._metrics,
            hooks,
            make_loader or self._loader,
            options.model_dir,
        )
        self._keys = KeyRing(options.api_keys, options.admin_key, options.own_key)
        self._certificates: ServerCertificates | None = None
        self._calls = OpenCalls()
        self._metrics.watch_calls(lambda: self._calls.num_open)
        self._spans = spans or _spans(options)
        self._grpc = grpc.aio.server(
            interceptors=(
                self._calls,
                Telemetry(self._metrics, spans=self._spans),
                Auth(self._keys),
                Fence(stall_limit_s),
            ),
            options=channel_options(options.engine),
        )
        self._closing = ExitStack()
        self._store: SlotStore | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.port: int | None = None
        self.metrics_port: int | None = None
        self.addresses: tuple[str, ...] = ()

    async def start(self) -> None:
        """Opens the doors; from now on health is answered.

        Raises:
            BindError: An address is in use or cannot be had, or its certificates cannot be used.
        """
        await self._health.set("", _SERVING)
        await self._set_ready(False)
        self._add_servicers()
        self._bind()
        await self._grpc.start()
        self._spawn(watch_loop_lag(self._metrics.observe_loop_lag))
        self._spawn(watch_memory(trim))
        self.reloads = self._watched_files()
        self._spawn(self.reloads.watch())

    async def load(self, load_model: LoadModel) -> None:
        """Builds the model on a thread of its own, then is ready.

        Raises:
            ShuttingDown: The server was stopped meanwhile.
            Exception: Whatever the loader raises.
        """
        model = await self._bridge.load(load_model)
        await self._sweep(model.slot_store)
        self._open_store(model)
        self._watch()
        await self._set_ready(True)

    async def stop(self, timeout_s: float) -> None:
        """Ends within `timeout_s`: readiness drops, what waits is refused, what runs may finish.

        Then the rest is answered UNAVAILABLE, the engine thread is joined and the doors close.
        """
        await self._health.enter_graceful_shutdown()
        self._metrics.set_ready(False)
        # First: a change that is ended resumes the old model, on which nothing is to begin.
        self._bridge.close()
        await self._swap.stop()
        grace_s = max(0.0, timeout_s - _FLUSH_S)
        saves = self._autosaves.begin()
        await self._bridge.stop(grace_s, save_s=grace_s * _SAVE_SHARE if saves else 0.0)
        for autosave, begun in saves:
            await autosave.end(begun)
        await self._grpc.stop(min(timeout_s, _FLUSH_S))
        await self._calls.ended(_FLUSH_S)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._store is not None:
            self._store.identity.stop()
        self._closing.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    def _watch(self) -> None:
        """Adds the figures of what is served to the metrics."""
        self._metrics.watch(self._bridge.snapshot)
        if self._options.has_vllm_metrics:
            engine = self._options.engine
            room = len(engine.adapters) if engine.max_adapters is None else engine.max_adapters
            self._metrics.add(VllmCollector(self._bridge.snapshot, self._bridge.name, room))

    def _loader(self) -> ModelLoader:
        # jax takes a second to import; by now the first model has brought it.
        from service.loader import Loader

        return Loader(self._options)

    async def _on_served(self, model: LoadedModel) -> None:
        """Another model is served: slots are saved under its fingerprint from now on."""
        self._open_store(model)

    def _on_gone(self, model: LoadedModel) -> None:
        """A model has ended; the one after it has opened its own store already, or will."""
        store = model.slot_store
        if store is None:
            return
        store.identity.stop()
        self._autosaves.remove(store)
        if store is self._store:
            self._store = None

    async def _set_ready(self, is_ready: bool) -> None:
        self._metrics.set_ready(is_ready)
        await self._health.set(READY_SERVICE, _SERVING if is_ready else _NOT_SERVING)

    async def _sweep(self, store: SlotStore | None) -> None:
        """Cleans the folder of slot files; at the start, when no save of this process runs."""
        if store is None:
            return
        try:
            num_swept = await asyncio.to_thread(store.sweep)
        except EngineError as error:
            _LOG.warning("the folder of slot files is not swept: %s", error)
        else:
            if num_swept:
                _LOG.info("%d files of saves that were cut off are removed", num_swept)

    def _open_store(self, model: LoadedModel) -> None:
        """Begins to hash the model, by which its slot files are known, and restores its slots."""
        self._store = store = model.slot_store
        if store is None:
            return
        store.identity.start()
        if self._options.slot_autosave:
            self._spawn(self._autosaves.add(model.engine, store).restore())

    def _on_fault(self, fault: BaseException) -> None:
        """The engine is gone for good: neither ready nor alive, so that a supervisor restarts."""
        _LOG.critical("the engine thread died: %s", type(fault).__name__)
        self._spawn(self._report_death())

    def _on_pools(self, state: RebuildState) -> None:
        """Not ready while the pools are replaced; for good if that could not be undone."""
        if state is RebuildState.FAILED:
            self._spawn(self._report_death())
            return
        self._spawn(self._set_ready(state is RebuildState.SERVING))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something until it is done or the server stops."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _report_death(self) -> None:
        await self._set_ready(False)
        await self._health.set("", _NOT_SERVING)

    def _call_groups(self) -> CallGroups:
        engine = self._options.engine
        # A group counts once in the queue, and is no larger than there are slots.
        room = WaitingRoom(
            max_calls=engine.queue_requests * engine.num_slots, max_bytes=engine.queue_bytes
        )
        return CallGroups(room, self._group_patience_s)

    def _add_servicers(self) -> None:
        server, bridge = self._grpc, self._bridge
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(
                bridge,
                self._metrics,
                IdleSlotLog(is_on=self._options.tells_idle_slots),
                self._call_groups(),
            ),
            server,
        )
        tokenization_pb2_grpc.add_TokenizationServiceServicer_to_server(
            TokenizationServicer(bridge), server
        )
        embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(EmbeddingServicer(bridge), server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(
            ModelServicer(
                bridge,
                self._metrics,
                self._swap,
                has_slot_folder=self._options.slot_save_path is not None,
                queue_bytes=self._options.engine.queue_bytes,
            ),
            server,
        )
        slot_pb2_grpc.add_SlotServiceServicer_to_server(SlotServicer(bridge, self._metrics), server)
        lora_pb2_grpc.add_LoraServiceServicer_to_server(
            LoraServicer(bridge, self._options.adapter_dir), server
        )
        rebuild_pb2_grpc.add_RebuildServiceServicer_to_server(
            RebuildServicer(bridge, self._metrics, self._on_pools), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        _add_reflection(server)

    def _bind(self) -> None:
        options = self._options
        if options.private_socket is not None:
            address = f"unix:{options.private_socket}"
            self._listen(address, None)
            self.addresses += (address,)
        if options.grpc_port is not None:
            address = _address(options.grpc_host, options.grpc_port)
            _refuse_taken(options.grpc_host, options.grpc_port)
            self.port = self._listen(address, self._server_credentials())
            self.addresses += (_address(options.grpc_host, self.port),)
        if options.metrics_port is not None:
            host, port = options.grpc_host, options.metrics_port
            try:
                metrics = MetricsServer(self._metrics, host, port)
            except OSError as error:
                raise _refused(_address(host, port), error.strerror, "--metrics-port") from error
            self.metrics_port = self._closing.enter_context(metrics).port

    def _server_credentials(self) -> grpc.ServerCredentials | None:
        if self._options.tls is None:
            return None
        try:
            self._certificates = ServerCertificates(self._options.tls)
        except BadCertificates as error:
            raise BindError(str(error)) from error
        return self._certificates.credentials()

    def _watched_files(self) -> Reloads:
        """What is read again when it changes; everything else takes a restart."""
        watched = [self._certificates.watched] if self._certificates else []
        if self._options.key_file is not None:
            watched.append(self._options.key_file.watched(self._keys))
        return Reloads(watched, self._metrics.count_reload)

    def _listen(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        try:
            if credentials is None:
                return self._grpc.add_insecure_port(address)
            return self._grpc.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise _refused(address, "the address cannot be had", "--grpc-port") from error


def _refuse_taken(host: str, port: int) -> None:
    """Looks first, since gRPC tells of a taken port on stderr, in words of its own."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise _refused(_address(host, port), error.strerror, "--grpc-port") from error


def _refused(address: str, cause: str | None, flag: str) -> BindError:
    return BindError(f"cannot listen on {address}: {cause} (see {flag})")


async def serve(
    options: ServiceOptions, stop: asyncio.Event, load_model: LoadModel | None = None
) -> int:
    """Serves until `stop` is set.

    Args:
        options: what was asked for.
        stop: set by whoever catches signals.
        load_model: builds the model; None takes the one that the options name.

    Returns:
        The exit status: 0 after a stop, 1 if an address or the model cannot be had.
    """
    server = Server(options)
    try:
        await server.start()
    except BindError as error:
        await server.stop(0.0)
        _LOG.error("%s", error)
        return 1
    _LOG.info("listening on %s", ", ".join(server.addresses))
    if server.metrics_port is not None:
        _LOG.info("metrics on %s", _address(options.grpc_host, server.metrics_port))
    if options.slot_save_path is not None and not options.defaults.cache_prompt:
        _LOG.warning(
            "--no-cache-prompt with --slot-save-path: a restored slot is used only by requests "
            "that ask for cache_prompt themselves"
        )
    stopping = asyncio.create_task(stop.wait())
    loading = asyncio.create_task(server.load(load_model or _named_by(options)))
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    failure = None if stop.is_set() else loading.exception()
    if failure is None:
        if not stop.is_set():
            _LOG.info("ready")
        await stopping
    await server.stop(options.shutdown_timeout_s if failure is None else 0.0)
    for task in (loading, stopping):
        task.cancel()
    await asyncio.gather(loading, stopping, return_exceptions=True)
    # The last line says how it ended.
    if failure is not None:
        _log_failure(failure)
        return 1
    _LOG.info("stopped")
    return 0


def _named_by(options: ServiceOptions) -> LoadModel:
    def load(sink: EventSink) -> LoadedModel:
        # jax takes a second to import, which health and the gateway must not wait for.
        from service.loader import load_named

        # What was imported stays: no collection needs to look at it again.
        gc.freeze()
        gc.set_threshold(_COLLECT_AFTER)
        gc.enable()
        return load_named(options, sink)

    return load


def _log_failure(error: BaseException) -> None:
    if isinstance(error, EngineError | FetchError):
        _LOG.error("cannot load the model: %s", error)
    else:
        _LOG.error("cannot load the model", exc_info=error)


def _add_reflection(server: grpc.aio.Server) -> None:
    """Adds reflection as v1alpha and, the same messages under the newer name, as v1."""
    names = (
        *(service.full_name for service in _SERVICES),
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
    )
    reflection.enable_server_reflection(names, server)
    # grpcio-reflection has only v1alpha (grpc#38576); grpcurl and buf ask for v1 first.
    servicer: Any = reflection.aio.ReflectionServicer(names)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "grpc.reflection.v1.ServerReflection",
                {
                    "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
                        servicer.ServerReflectionInfo,
                        reflection_pb2.ServerReflectionRequest.FromString,
                        reflection_pb2.ServerReflectionResponse.SerializeToString,
                    )
                },
            ),
        )
    )


def _spans(options: ServiceOptions) -> Spans | None:
    if options.otlp_endpoint is None:
        return None
    # Of the extra `otel`, which options have made sure of.
    from service.tracing import otlp_spans

    return otlp_spans(options.otlp_endpoint)


def _address(host: str, port: int) -> str:
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"
