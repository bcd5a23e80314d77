"""The look of every page: colours, type, header, chips, cards. System fonts only; nothing is fetched from anywhere.

Pages build from these few parts, so that they look alike. NiceGUI sends nothing for a text or class set to what it
is already, so pages set freely on each refresh. No data is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement
from nicegui.events import GenericEventArguments

LOGO = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" width="22" height="22" aria-hidden="true">'
    '<rect x="2" y="12" width="5.5" height="9" rx="1.6" fill="#5b5bd6"/>'
    '<rect x="9.2" y="7.5" width="5.5" height="13.5" rx="1.6" fill="#5b5bd6" opacity=".62"/>'
    '<rect x="16.4" y="3" width="5.5" height="18" rx="1.6" fill="#12a594"/></svg>'
)

DARK_SCRIPT = """(() => {
  const names = {auto: 'Auto', light: 'Light', dark: 'Dark'}, order = ['auto', 'light', 'dark'];
  const kept = () => { try { return localStorage.getItem('twinstep-scheme') } catch { return null } };
  const apply = () => {
    const now = order.includes(kept()) ? kept() : 'auto';
    if (window.setDark) setDark(now === 'auto' ? null : now === 'dark');
    document.querySelectorAll('.tw-scheme-name').forEach((e) => { e.dataset.scheme = names[now]; });
    return now;
  };
  window.twinstepScheme = () => {
    const next = order[(order.indexOf(apply()) + 1) % 3];
    try { localStorage.setItem('twinstep-scheme', next) } catch { }
    apply();
  };
  const wait = () => (window.setDark && document.querySelector('.tw-scheme-name')) ? apply() : setTimeout(wait, 10);
  wait();
})();"""
"""Keeps the colour scheme that somebody chose in their browser, and nowhere else; without a choice the system's."""


EARLY_SCRIPT = """const kept = (() => {
    try { return localStorage.getItem('twinstep-scheme') } catch { return null }
  })();
  const dark = kept === 'dark' || (kept !== 'light' && matchMedia('(prefers-color-scheme: dark)').matches);
  document.body.classList.toggle('body--dark', dark);"""
"""The same for a page of plain HTML, before it is drawn."""


KEYS_SCRIPT = """document.addEventListener('keydown', (event) => {
  if (event.key !== '/' || event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const field = document.querySelector('.tw-search');
  if (field) { event.preventDefault(); field.focus(); field.select(); }
});"""
"""The key / leads to a page's first search field."""


def style_sheet() -> str:
    """Return the style sheet of every page."""
    return resources.files("twinstep.platform.dashboard").joinpath("style.css").read_text(encoding="utf-8")


def add_style() -> None:
    """Put the style sheet on the page being built."""
    ui.add_head_html(f"<style>{style_sheet()}</style>")


def div(classes: str = "") -> ui.element:
    """Return a plain container."""
    return ui.element("div").classes(classes)


def text(content: str, classes: str = "") -> ui.label:
    """Return a piece of text; whatever it holds is shown as it is, never read as HTML."""
    return ui.label(content).classes(classes)


def tag(name: str, content: str, classes: str = "") -> TextElement:
    """Return an HTML element `name` that holds text."""
    return TextElement(tag=name, text=content).classes(classes)


def button(content: str, classes: str = "") -> TextElement:
    """Return a plain button."""
    return tag("button", content, f"tw-btn {classes}").props('type="button"')


def show(element: ui.element, yes: bool) -> None:
    """Show or hide an element."""
    element.classes(remove="tw-hide") if yes else element.classes(add="tw-hide")


def enable(element: ui.element, yes: bool) -> None:
    """Let a button be pressed, or not."""
    element.props(remove="disabled") if yes else element.props("disabled")


@contextmanager
def frame(*, here: str = "", user: str = "") -> Iterator[None]:
    """Build the page's header and hold its content in one centred column.

    Args:
        here: the page's name in the header, where it has one.
        user: who is logged in; empty where no login is asked for.
    """
    add_style()
    ui.add_body_html(f"<script>{DARK_SCRIPT}{KEYS_SCRIPT}</script>")
    with_props(tag("a", "Skip to content", "tw-skip"), href="#main")
    with ui.element("header").classes("tw-top"), div("tw-top-in"):
        with ui.link(target="/").classes("tw-brand"):
            ui.html(LOGO, sanitize=False)
            text("Twinstep")
        with ui.element("nav").classes("tw-nav"):
            for name, target in (("Jobs", "/"), ("Queue", "/queue"), ("API", "/docs")):
                link = ui.link(name, target).classes("tw-here" if name == here else "")
                if name == here:
                    with_props(link, aria_current="page")
            with tag("button", "", "tw-scheme").props(
                'type="button" title="Light, dark, or as the system has it"'
            ) as scheme:
                text("", "tw-scheme-name")
            scheme.on("click", js_handler="() => window.twinstepScheme()")
            if user:
                _user_menu(user)
    with ui.element("main").classes("tw-main").props('id="main" tabindex="-1"'):
        yield


def _user_menu(user: str) -> None:
    with tag("details", "", "tw-user"):
        tag("summary", user, "tw-cell")
        with div("tw-user-menu"):
            text("Logged in with a token; the token stays good when you log out.", "tw-dim tw-small tw-wrap")
            out = button("Log out", "tw-btn-small")
    # The cookie is one that only the server can take back.
    out.on("click", js_handler="() => fetch('/v1/session', {method: 'DELETE'}).then(() => location.assign('/login'))")


@contextmanager
def card(title: str, *, note: str = "", classes: str = "") -> Iterator[ui.element]:
    """Build a framed section with a heading; the value is the element to the right in the heading's row."""
    with ui.element("section").classes(f"tw-card {classes}"):
        with div("tw-card-head"):
            tag("h2", title, "tw-h2")
            if note:
                text(note, "tw-dim tw-small")
            right = div("tw-card-right")
        yield right


class Chip:
    """A state as a coloured pill; setting the same state again sends nothing to the browser."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.label = text(state, f"tw-chip tw-{state}")

    def set(self, state: str) -> None:
        """Show another state."""
        if state != self.state:
            self.label.classes(remove=f"tw-{self.state}", add=f"tw-{state}")
            self.label.set_text(state)
            self.state = state


class Bar:
    """A thin progress bar with its share as the accessible value."""

    def __init__(self) -> None:
        self.share = -1.0
        with div("tw-bar").props('role="progressbar" aria-valuemin="0" aria-valuemax="100"') as self.track:
            self.fill = div("tw-bar-fill")

    def set(self, step: int, total: int) -> None:
        """Show `step` of `total`; nothing is sent while the bar would not move by a tenth of a percent."""
        share = round(100 * min(step / total, 1.0), 1) if total > 0 else 0.0
        if share != self.share:
            self.share = share
            self.fill.style(f"width: {share}%")
            self.track.props(f'aria-valuenow="{share:.0f}"')


def with_props(element: ui.element, **props: str | bool) -> ui.element:
    """Set HTML attributes to any text, which `props()` would read as its own little language; `_` stands for `-`."""
    for name, value in props.items():
        element.props[name.rstrip("_").replace("_", "-")] = value
    return element


def check(label: str, on_change: Callable[[bool], None]) -> ui.element:
    """Return a check box; `label` is read to those who cannot see where it stands."""
    box = with_props(ui.element("input").classes("tw-check"), type="checkbox", aria_label=label)

    def changed(event: GenericEventArguments) -> None:
        box.props["checked"] = bool(event.args)
        on_change(bool(event.args))

    return box.on("change", changed, js_handler="(event) => emit(event.target.checked)")


def select(label: str, options: Mapping[str, str], value: str, on_change: Callable[[str], object]) -> ui.element:
    """Return a drop-down list of `options` (value to words) with its label before it."""
    with tag("label", "", "tw-select"):
        text(label, "tw-dim tw-small")
        with with_props(ui.element("select"), aria_label=label) as chooser:
            for each, words in options.items():
                option = with_props(tag("option", words), value=each)
                if each == value:
                    option.props["selected"] = True
    return chooser.on("change", lambda event: on_change(str(event.args)), js_handler="(e) => emit(e.target.value)")


def number(label: str, value: str, on_input: Callable[[str], object]) -> ui.element:
    """Return a field for a whole number with its label before it; what stands in it is told as text."""
    with tag("label", "", "tw-select"):
        text(label, "tw-dim tw-small")
        box = with_props(ui.element("input").classes("tw-search tw-number"), type="number", min="1", step="1")
        box.props["^value"] = value
    return box.on("input", lambda event: on_input(str(event.args)), js_handler="(e) => emit(e.target.value)")


def search(label: str, value: str, on_input: Callable[[str], object]) -> ui.element:
    """Return a search field that tells what stands in it a moment after it was typed."""
    box = ui.element("input").classes("tw-search")
    with_props(box, type="search", placeholder=label, aria_label=label, autocomplete="off", maxlength="200")
    # As an attribute (^): Vue sets a property `value` again with whatever is drawn anew, over what is being typed.
    box.props["^value"] = value
    # The browser waits for the end of a word: what is typed fast is one question, and the last one is always asked.
    wait = "({target}) => { clearTimeout(target.wait); target.wait = setTimeout(() => emit(target.value), 250); }"
    return box.on("input", lambda event: on_input(str(event.args)), js_handler=wait)
