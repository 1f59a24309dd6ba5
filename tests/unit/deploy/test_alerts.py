"""Alerts and the dashboard: loaded and fired by promtool, about metrics that are there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from kvarts.v1 import model_pb2

from tests.contract.serving import serving

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "deploy" / "monitoring"
CASES = Path(__file__).parent / "alerts_test.yaml"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="asks Prometheus' promtool")
_NAME = re.compile(r"\b(?:kvarts|process)_[a-z_]+")
_PARTS = re.compile(r"_(?:bucket|sum|count)$")


def spec() -> dict[str, Any]:
    return yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in spec()["groups"] for rule in group["rules"]]


def promtool(*words: str, folder: Path) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_the_rules_load(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec()))
    found = promtool("check", "rules", "rules.yaml", folder=tmp_path)
    assert f"{len(rules())} rules found" in found


@needs_promtool
def test_every_alert_fires_and_only_for_its_cause(tmp_path: Path) -> None:
    """Annotations are texts for people: the cases compare what fires, and for whom."""
    bare = spec()
    for group in bare["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(bare))
    cases = {"rule_files": ["rules.yaml"]} | yaml.safe_load(CASES.read_text())
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(cases))
    promtool("test", "rules", "cases.yaml", folder=tmp_path)


def test_every_alert_has_a_case_that_fires_it() -> None:
    fired = {
        test["alertname"]
        for case in yaml.safe_load(CASES.read_text())["tests"]
        for test in case["alert_rule_test"]
        if test["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules()}


def test_every_alert_has_a_runbook_entry() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    headings = set(re.findall(r"^#### (\w+)$", page, re.M))
    for rule in rules():
        assert rule["alert"] in headings
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")
    # None of the peer's rates, which a second scraper resets, and none of a name that is gone.
    assert "llamacpp:" not in (MONITORING / "alerts.yaml").read_text()
    assert {name for name in headings if name.startswith("Kvarts")} == {
        rule["alert"] for rule in rules()
    }


async def test_alerts_and_dashboard_ask_for_metrics_that_are_there(tmp_path: Path) -> None:
    async with serving(slot_save_path=str(tmp_path)) as it:
        text = (await it.model.GetMetrics(model_pb2.GetMetricsRequest())).text
    # Of the gateway, which counts for itself.
    known = set(re.findall(r"^# TYPE (\S+)", text, re.M)) | {"kvarts_http_config_reloads_total"}
    asked = " ".join(rule["expr"] for rule in rules())
    asked = asked.replace('{__name__=~"kvarts_(http_)?config_reloads_total",', "{")
    asked += " ".join(
        target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]
    )
    names = {_PARTS.sub("", name) for name in _NAME.findall(asked)}
    assert names <= known, names - known


def dashboard() -> dict[str, Any]:
    return json.loads((MONITORING / "dashboard.json").read_text())


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """Ids and places are unique, and every panel asks the chosen source."""
    panels = cast("list[dict[str, Any]]", dashboard()["panels"])
    ids = [panel["id"] for panel in panels]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(ids)) == len(set(places)) == len(panels) == 15
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
    variables = [variable["name"] for variable in dashboard()["templating"]["list"]]
    assert variables == ["datasource", "instance"]
