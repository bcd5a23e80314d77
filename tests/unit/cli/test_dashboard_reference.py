"""The API's reference as a page: whole, without anything from elsewhere, and text stays text."""

from __future__ import annotations

import asyncio
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from twinstep.platform.api import create_app
from twinstep.platform.dashboard.reference_page import answer, page
from twinstep.platform.scheduler.service import Service
from twinstep.platform.settings import Settings


class Found(HTMLParser):
    """What a page links to, what can be linked to, and whether each element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.sources: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        self.ids += [told["id"] or ""] if "id" in told else []
        self.links += [told["href"] or ""] if "href" in told else []
        self.sources += [told["src"] or ""] if "src" in told else []
        if tag not in ("meta", "input", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.open.pop() == tag


def document() -> dict[str, Any]:
    return create_app(cast(Service, None)).openapi()


def test_every_operation_and_every_schema_has_its_place_and_every_link_leads_to_one() -> None:
    wanted = document()
    text = page(wanted)
    found = Found(text)
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    places = {f"#{each}" for each in found.ids}
    assert {each for each in found.links if each.startswith("#")} <= places
    operations = [each for methods in wanted["paths"].values() for each in methods.values()]
    assert text.count("data-part>") == len(operations) + len(wanted["components"]["schemas"])
    for each in operations:
        assert escape(each["summary"]) in text
    assert "the newest job of that name" in text
    assert "Idempotency-Key" in text


def test_nothing_comes_from_elsewhere() -> None:
    found = Found(page(document()))
    assert found.sources == []
    assert {each for each in found.links if not each.startswith("#")} == {"/", "/queue", "/docs", "/openapi.json"}


def test_text_of_the_document_stays_text() -> None:
    evil = "<script>x</script> `<b>` &amp;"
    operation = {
        "summary": evil,
        "description": evil,
        "security": [],
        "tags": [evil],
        "parameters": [{"name": evil, "in": "query", "required": False, "description": evil, "schema": {"type": evil}}],
        "responses": {"200": {"description": evil}},
    }
    schema = {"description": evil, "properties": {evil: {"description": evil, "default": evil}}}
    text = page({"paths": {f"/{evil}": {"get": operation}}, "components": {"schemas": {"A": schema}}})
    assert "<script>x" not in text
    assert "<b>" not in text
    assert len(re.findall("&lt;script&gt;", text)) >= 10


@pytest.mark.parametrize(
    ("public_url", "shown"),
    [(None, "http://inside:8765/v1/jobs"), ("https://twinstep.example.com", "https://twinstep.example.com/v1/jobs")],
)
def test_its_examples_ask_where_users_reach_the_control_plane(
    tmp_path: Path, public_url: str | None, shown: str
) -> None:
    app = create_app(cast(Service, SimpleNamespace(settings=Settings(data_dir=tmp_path, public_url=public_url))))
    scope = {"type": "http", "app": app, "scheme": "http", "path": "/docs", "root_path": "", "query_string": b"",
             "headers": [(b"host", b"inside:8765")]}  # fmt: skip
    text = bytes(asyncio.run(answer(Request(scope))).body).decode()
    asked = re.findall(r"https?://[^\s<]+/v1/jobs(?=<)", text)
    assert asked
    assert set(asked) == {shown}
