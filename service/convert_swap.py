"""Between the messages of LoadModel and a change of the model."""

from __future__ import annotations

from kvarts.v1 import model_pb2

from service.convert import to_duration
from service.load_watch import Progress
from service.model_loader import LoadPlan, LoadStage
from service.swap import Swapped, SwapWish

_STAGES = {
    LoadStage.CHECK: model_pb2.LOAD_STAGE_CHECK,
    LoadStage.DRAIN: model_pb2.LOAD_STAGE_DRAIN,
    LoadStage.WEIGHTS: model_pb2.LOAD_STAGE_WEIGHTS,
    LoadStage.EXPERTS: model_pb2.LOAD_STAGE_EXPERTS,
    LoadStage.COMPILE: model_pb2.LOAD_STAGE_COMPILE,
    LoadStage.ROLL_BACK: model_pb2.LOAD_STAGE_ROLL_BACK,
}


def to_swap_wish(request: model_pb2.LoadModelRequest) -> SwapWish:
    """Reads a request that was checked."""
    has_limit = request.HasField("drain_timeout")
    return SwapWish(
        path=request.path,
        validates_only=request.validate_only,
        replaces_first=request.replace_first,
        drain_s=request.drain_timeout.ToTimedelta().total_seconds() if has_limit else None,
    )


def from_progress(progress: Progress) -> model_pb2.LoadProgress:
    """Writes a step of the way."""
    return model_pb2.LoadProgress(
        stage=_STAGES[progress.stage], done=progress.done, total=progress.total
    )


def from_swapped(swapped: Swapped, model: model_pb2.Model) -> model_pb2.LoadedModel:
    """Writes the end; `model` is the message of the model that is served."""
    return model_pb2.LoadedModel(
        model=model,
        plan=_plan(swapped.plan, is_beside=swapped.is_beside),
        elapsed=to_duration(swapped.elapsed_s),
        unavailable=to_duration(swapped.unavailable_s),
        calls_on_old_model=swapped.num_left,
    )


def _plan(plan: LoadPlan, *, is_beside: bool) -> model_pb2.LoadPlan:
    return model_pb2.LoadPlan(
        needed_bytes=plan.needed_bytes,
        available_bytes=plan.available_bytes,
        side_by_side=is_beside,
    )
