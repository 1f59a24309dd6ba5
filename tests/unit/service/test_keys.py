from __future__ import annotations

import pytest

from service.keys import Access, Grant, KeyRing


def test_without_keys_every_call_is_an_admins() -> None:
    ring = KeyRing()
    assert ring.is_open
    assert ring.judge(None) == ring.judge("anything") == Grant(Access.ADMIN)


@pytest.mark.parametrize("presented", [None, "", "ke", "key2", "KEY", " key", "k\u00e9y", "\udc80"])
def test_a_wrong_key_is_no_key(presented: str | None) -> None:
    assert KeyRing(["key"]).judge(presented).access is Access.NONE


@pytest.mark.parametrize("position", [0, 1, 2])
def test_any_of_several_keys_opens(position: int) -> None:
    keys = ["a", "b", "\u00e9\u4e2d"]
    assert KeyRing(keys, "root").judge(keys[position]).access is Access.USER


def test_a_single_key_has_no_tenant_and_several_have_one_each() -> None:
    assert KeyRing(["a"]).judge("a") == Grant(Access.ADMIN, "")
    ring = KeyRing(["a", "b"], "root")
    tenants = {ring.judge(key).tenant for key in ("a", "b", "root")}
    assert len(tenants) == 3
    assert "" not in tenants
    assert all("a" != tenant != "b" for tenant in tenants)


def test_an_admin_key_splits_the_rights() -> None:
    ring = KeyRing(["user"], "root")
    assert ring.judge("user").access is Access.USER
    assert ring.judge("root").access is Access.ADMIN
    assert ring.judge("root").owns_all
    assert not ring.judge("user").owns_all


def test_an_admin_key_alone_leaves_ordinary_calls_open() -> None:
    ring = KeyRing((), "root")
    assert ring.judge(None).access is Access.USER
    assert ring.judge("root").access is Access.ADMIN
    # Official clients always send one.
    assert ring.judge("sk-none").access is Access.USER
