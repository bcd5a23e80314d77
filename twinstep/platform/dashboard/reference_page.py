"""The page `/docs`: the API's reference, drawn from its OpenAPI document. Plain HTML; nothing comes from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from string import Template
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from twinstep.platform.dashboard.theme import EARLY_SCRIPT, LOGO, style_sheet
from twinstep.spec.schema_words import Schema, access_words, answer_words, limit_words, type_words, value_words

PATH = "/docs"
HERE = "https://control-plane.invalid"
_CODE = re.compile(r"`([^`]+)`")
_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>API · Twinstep</title><style>$css</style></head>
<body><script>$early</script>
<header class="tw-top"><div class="tw-top-in"><a class="tw-brand" href="/">$logo<span>Twinstep</span></a>
<nav class="tw-nav"><a href="/">Jobs</a><a href="/queue">Queue</a><a class="tw-here" aria-current="page"
 href="/docs">API</a></nav></div></header>
<main class="tw-main"><div class="tw-head"><h1 class="tw-h1">REST API</h1>
<a class="tw-btn tw-btn-small" href="/openapi.json">openapi.json</a></div>
<div class="tw-filters"><input class="tw-search" type="search" id="find" autocomplete="off"
 placeholder="Search paths, fields and words" aria-label="Search the reference"></div>
<p class="tw-dim tw-ref-none tw-hide" id="none" role="status">Nothing here has these words.</p>
<div class="tw-ref"><nav class="tw-ref-nav" aria-label="Operations">$contents</nav><div class="tw-min">$body</div></div>
</main>
<script>
  const parts = [...document.querySelectorAll('[data-part]')], find = document.getElementById('find');
  find.addEventListener('input', () => {
    const words = find.value.toLowerCase().split(/\\s+/).filter(Boolean);
    let any = false;
    for (const part of parts) {
      const fits = words.every((word) => part.textContent.toLowerCase().includes(word));
      any ||= fits;
      part.classList.toggle('tw-hide', !fits);
      document.querySelector(`[data-to="$${part.id}"]`)?.classList.toggle('tw-hide', !fits);
    }
    document.getElementById('none').classList.toggle('tw-hide', any);
  });
</script></body></html>
""")


async def answer(request: Request) -> Response:
    """Answer with the page of the app that was asked; it is drawn once, but for the address it was asked at."""
    app: FastAPI = request.app
    if (drawn := getattr(app.state, "reference", None)) is None:
        drawn = app.state.reference = page(app.openapi())
    # Behind TLS the request came by plain HTTP; a token must not be sent by that.
    asked_at = app.state.service.settings.public_url or str(request.base_url)
    return HTMLResponse(drawn.replace(HERE, escape(asked_at.rstrip("/"))))


def page(document: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document; its examples ask the control plane at `HERE`."""
    schemas: Mapping[str, Schema] = document["components"]["schemas"]
    operations = [
        (method.upper(), path, each) for path, methods in document["paths"].items() for method, each in methods.items()
    ]
    body = [_operation(method, path, each, schemas) for method, path, each in operations]
    body.append('<h2 class="tw-h1 tw-ref-heading">What bodies and answers hold</h2>')
    body += [_schema(name, schemas[name], schemas) for name in sorted(schemas)]
    return _PAGE.substitute(
        css=style_sheet(),
        logo=LOGO,
        early=EARLY_SCRIPT,
        contents="".join(_contents(operations, schemas)),
        body="".join(body),
    )


def _contents(operations: Iterable[tuple[str, str, Schema]], schemas: Iterable[str]) -> Iterator[str]:
    by_tag: dict[str, list[str]] = {}
    for method, path, each in operations:
        link = (
            f'<a href="#{_anchor(method, path)}" data-to="{_anchor(method, path)}">{_verb(method)}'
            f'<span class="tw-cell">{escape(each["summary"])}</span></a>'
        )
        by_tag.setdefault(next(iter(each.get("tags", ())), "other"), []).append(link)
    for tag, links in by_tag.items():
        yield f'<h2 class="tw-ref-tag">{escape(tag)}</h2>{"".join(links)}'
    yield '<h2 class="tw-ref-tag">schemas</h2>'
    for name in sorted(schemas):
        yield f'<a href="#{_place(name)}" data-to="{_place(name)}"><span class="tw-cell">{escape(name)}</span></a>'


def _operation(method: str, path: str, operation: Schema, schemas: Iterable[str]) -> str:
    anchor, said = _anchor(method, path), operation.get("description", "")
    told = access_words(operation)
    if body := operation.get("requestBody"):
        kinds = " or ".join(f"`{kind}`" for kind in body["content"])
        holds = f"Body: {type_words(next(iter(body['content'].values()))['schema'])} as {kinds}."
    else:
        holds = ""
    words = "".join(f"<p>{_shown(each, schemas)}</p>" for each in (*said.split("\n\n"), told, holds) if each)
    statuses: dict[str, list[str]] = {}  # by what is answered with them
    for status, each in operation["responses"].items():
        statuses.setdefault(answer_words(each), []).append(status)
    answers = [(escape(", ".join(found)), _shown(words, schemas)) for words, found in statuses.items()]
    return (
        f'<section class="tw-card tw-ref-part" id="{anchor}" data-part><div class="tw-card-head">{_verb(method)}'
        f'<h2 class="tw-h2 tw-ref-path"><a href="#{anchor}">{escape(path)}</a></h2>'
        f'<span class="tw-dim tw-small">{escape(operation["summary"])}</span></div><div class="tw-card-body">{words}'
        + _table(
            ("Parameter", "In", "Type", "Default", "Meaning"), (_parameter(each, schemas) for each in _given(operation))
        )
        + _table(("Status", "Answer"), answers)
        + f'<pre class="tw-code">{escape(_curl(method, path, operation))}</pre></div></section>'
    )


def _given(operation: Schema) -> list[Schema]:
    return list(operation.get("parameters", ()))


def _parameter(each: Schema, schemas: Iterable[str]) -> tuple[str, ...]:
    schema = each["schema"]
    default = "required" if each["required"] else value_words(schema["default"]) if "default" in schema else ""
    meaning = _meaning(each.get("description", ""), limit_words(schema))
    cells = (f"`{each['name']}`", each["in"], type_words(schema), default, meaning)
    return tuple(_shown(cell, schemas) for cell in cells)


def _schema(name: str, schema: Schema, schemas: Iterable[str]) -> str:
    said = str(schema.get("description", ""))
    words = "".join(f"<p>{_shown(each, schemas)}</p>" for each in said.split("\n\n") if each)
    if "properties" not in schema and (limits := limit_words(schema)):
        words += f"<p>One of {_shown(limits, schemas)}.</p>"
    required = schema.get("required", ())
    rows = []
    for key, field in schema.get("properties", {}).items():
        default = "required" if key in required else value_words(field["default"]) if "default" in field else ""
        meaning = _meaning(str(field.get("description", "")), limit_words(field))
        cells = (f"`{key}`", type_words(field), default, meaning)
        rows.append(tuple(_shown(cell, schemas) for cell in cells))
    return (
        f'<section class="tw-card tw-ref-part" id="{_place(name)}" data-part><div class="tw-card-head">'
        f'<h2 class="tw-h2 tw-ref-path">{escape(name)}</h2></div><div class="tw-card-body">{words}'
        + _table(("Field", "Type", "Default", "Meaning"), rows)
        + "</div></section>"
    )


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of cells that are HTML; nothing where there is no row."""
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    if not lines:
        return ""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heads)
    return f'<div class="tw-ref-scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _curl(method: str, path: str, operation: Schema) -> str:
    kinds = list(operation.get("requestBody", {}).get("content", ()))
    asks = any(operation["security"])
    parts = ["curl", *(["-N"] if path.endswith("/stream") else []), *([] if method == "GET" else [f"-X {method}"])]
    parts += ['-H "Authorization: Bearer $TWINSTEP_TOKEN"'] if asks else []
    if kinds:
        kind = "application/yaml" if "application/yaml" in kinds else kinds[0]
        parts += [f"-H 'Content-Type: {kind}'", f"--data-binary @{'spec.yaml' if 'yaml' in kind else 'body.json'}"]
    filled = re.sub(r"\{(\w+)\}", lambda found: found[1].upper(), path)
    return " ".join((*parts, f"{HERE}{filled}"))


def _meaning(said: str, limits: str) -> str:
    return f"{said}{'' if said.endswith(('.', ':')) or not (said and limits) else ';'} {limits}".strip()


def _verb(method: str) -> str:
    return f'<span class="tw-verb tw-verb-{method.lower()}">{method}</span>'


def _anchor(method: str, path: str) -> str:
    return method.lower() + re.sub(r"\W+", "-", path).rstrip("-")


def _place(name: str) -> str:
    return f"schema-{escape(name)}"


def _shown(text: str, schemas: Iterable[str]) -> str:
    """Return words as HTML: what stands in backticks as code, and as a link where it names a schema."""

    def code(found: re.Match[str]) -> str:
        name = found[1]
        shown = f"<code>{name}</code>"
        return f'<a class="tw-ref-link" href="#{_place(name)}">{shown}</a>' if name in schemas else shown

    return _CODE.sub(code, escape(text))
