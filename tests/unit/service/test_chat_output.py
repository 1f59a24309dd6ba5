from __future__ import annotations

from dataclasses import replace

from kvarts.v1 import common_pb2, generation_pb2

from engine.text.chat_families import find_format
from service.chat import RenderedChat
from service.chat_output import plan_output
from tests.contract.serving import FACTS, fake_model
from tests.fakes import fake_engine

_LING = "<role>ASSISTANT</role> <arg_key> <|role_end|>"
_HERMES = '<think></think> <tool_call></tool_call> "name" "arguments"'


def _request() -> generation_pb2.GenerateRequest:
    message = common_pb2.ChatMessage(role="user", content="x")
    return generation_pb2.GenerateRequest(chat=common_pb2.ChatPrompt(messages=[message]))


def test_a_familys_own_end_stops_its_answers() -> None:
    model = fake_model(fake_engine(lambda events: None), facts=replace(FACTS, chat_template=_LING))
    assert plan_output(_request(), RenderedChat("x"), model).stops == ("<|role_end|>",)


def test_what_the_prompt_opened_is_the_answers_beginning() -> None:
    model = fake_model(
        fake_engine(lambda events: None), facts=replace(FACTS, chat_template=_HERMES)
    )
    assert find_format(_HERMES).name == "hermes"
    chat = RenderedChat("x<think>", thinking="<think>", opening="<think>")
    told = plan_output(_request(), chat, model).begin().push("hm</think>so", is_last=True)
    assert [(one.reasoning, one.content) for one in told] == [("hm", ""), ("", "so")]


def test_what_the_client_wrote_of_an_answer_is_not_told_again() -> None:
    model = fake_model(
        fake_engine(lambda events: None), facts=replace(FACTS, chat_template=_HERMES)
    )
    chat = RenderedChat("x", opening="<think>hm</think>so", is_continued=True)
    told = plan_output(_request(), chat, model).begin().push(" it is", is_last=True)
    assert [(one.reasoning, one.content) for one in told] == [("", " it is")]
