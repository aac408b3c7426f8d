"""The frame of every page: session, navigation, theme, and errors of the server."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import RedirectResponse, Response
from nicegui import background_tasks, ui

from serve_app._version import __version__
from serve_app.client import AsyncClient, AuthenticationError, ServerError, TransportError
from serve_app.console.live_metrics import LiveMetrics
from serve_app.console.sessions import Session, SessionStore

T = TypeVar("T")
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="6" '
    'fill="#17507f"/><path d="M6 22h20M6 16h13M6 10h20M22 13l4 3-4 3" stroke="#fff" stroke-width="3" '
    'fill="none" stroke-linecap="round" stroke-linejoin="round"/></svg>'
)
_STYLE = Path(__file__).with_name("style.css")
_NAVIGATION = (
    ("/", "Overview", "dashboard"),
    ("/experiments", "Experiments", "science"),
    ("/workflows", "Workflows", "account_tree"),
    ("/async", "Async predictions", "schedule"),
    ("/events", "Events and logs", "list_alt"),
)
_MODEL_SECTIONS = (
    ("", "Versions"),
    ("/try", "Try it"),
    ("/traffic", "Traffic"),
    ("/experiments", "Experiments"),
    ("/rollout", "Rollout"),
    ("/shadow", "Shadow"),
    ("/drift", "Drift"),
)
_THEMES = {"dark": True, "light": False}
_sessions: SessionStore | None = None


def use_sessions(sessions: SessionStore) -> None:
    """Set the sessions of this process's pages."""
    global _sessions
    _sessions = sessions


def get_sessions() -> SessionStore:
    assert _sessions is not None
    return _sessions


def get_prefix(request: Request) -> str:
    """Return the path under which a reverse proxy serves the console."""
    return request.headers.get("x-forwarded-prefix", "").rstrip("/")


class View:
    """A page that a browser has open: its session, and how it shows the server's errors."""

    def __init__(self, session: Session, prefix: str) -> None:
        self.session = session
        self.prefix = prefix
        self._banner: ui.label | None = None

    @property
    def client(self) -> AsyncClient:
        return self.session.client

    @property
    def metrics(self) -> LiveMetrics:
        """The metrics of the session's server, which its pages share."""
        if "metrics" not in self.session.cache:
            self.session.cache["metrics"] = LiveMetrics(self.client)
        metrics: LiveMetrics = self.session.cache["metrics"]
        return metrics

    @property
    def may_manage(self) -> bool:
        return self.session.has_right("manage")

    def url(self, path: str) -> str:
        return f"{self.prefix}{path}"

    def link(self, text: str, path: str) -> ui.link:
        return ui.link(text, self.url(path))

    def go(self, path: str) -> None:
        ui.navigate.to(self.url(path))

    async def load(self, request: Awaitable[T]) -> T | None:
        """Return the result of a request for data; show a failure in the banner and return None."""
        try:
            result = await request
        except AuthenticationError as error:
            if error.reason in ("invalid_token", "expired_token", "missing_token"):
                ui.navigate.to(self.url("/login"))
            self._show_banner(f"The server refuses this: {error.message}")
        except ServerError as error:
            self._show_banner(f"{error.message} ({error.status})")
        except TransportError as error:
            self._show_banner(f"The server does not respond ({error!r}). This page tries again.")
        else:
            self._show_banner("")
            return result
        return None

    async def change(self, request: Awaitable[T], done: str = "") -> T | None:
        """Return the result of a request that changes something; show its outcome, or its refusal."""
        try:
            result = await request
        except ServerError as error:
            detail = f": {error.detail.strip().splitlines()[-1][:300]}" if error.detail.strip() else ""
            ui.notify(f"Refused: {error.message}{detail}", type="negative", multi_line=True, timeout=10_000)
        except (TransportError, ValueError) as error:
            ui.notify(f"Failed: {error}", type="negative", multi_line=True, timeout=10_000)
        else:
            if done or isinstance(result, str):
                ui.notify(done or result, type="positive", multi_line=True)
            return result
        return None

    def restrict(self, *elements: Any) -> None:
        """Disable controls, with the reason, where the key may not change anything."""
        if self.may_manage:
            return
        for element in elements:
            element.disable()
            with element:
                ui.tooltip(f"The key {self.session.name} lacks the right manage.")

    def every(self, seconds: float, refresh: Callable[[], Awaitable[None]]) -> None:
        """Call ``refresh`` now and then every some seconds while the page is open, never twice at once."""
        lock = asyncio.Lock()

        async def run() -> None:
            if not lock.locked():
                async with lock:
                    await refresh()

        ui.timer(seconds, run, immediate=True)

    def set_banner(self, banner: ui.label) -> None:
        self._banner = banner

    def _show_banner(self, text: str) -> None:
        if self._banner is not None and self._banner.text != text:
            self._banner.set_text(text)
            self._banner.set_visibility(bool(text))


def console_page(
    path: str, title: str, section: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate ``build(view, **path_parameters)``, which adds a page's contents to the frame.

    With ``section`` the page belongs to the model in the path parameter ``model``.
    """

    def decorate(build: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(inspect.signature(build, eval_str=True).parameters.values())[1:]

        @functools.wraps(build)
        async def page(request: Request, **arguments: Any) -> Response | None:
            prefix = get_prefix(request)
            session, failure = await _find_session(request)
            if session is None and not failure:
                return RedirectResponse(f"{prefix}/login", 303)
            if session is None:
                _build_failure(failure)
                return None
            view = View(session, prefix)
            model = arguments.get("model", "") if section is not None else ""
            ui.page_title(f"{model or title} · Torchrelay")
            with _build_frame(view, request, path):
                if section is not None:
                    _build_model_head(view, model, section)
                else:
                    ui.label(title).classes("page-title").props('role="heading" aria-level="1"')
                banner = ui.label().classes("banner").props('role="alert"')
                banner.set_visibility(False)
                view.set_banner(banner)
                result = build(view, **arguments)
                if inspect.isawaitable(result):
                    await result
            return None

        first = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Request)
        page.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
        del page.__wrapped__
        return ui.page(path)(page)

    return decorate


async def _find_session(request: Request) -> tuple[Session | None, str]:
    """Return the session of a request; None with a text where the server does not respond."""
    sessions = get_sessions()
    if session := sessions.find(request.scope.get("session_cookie", "")):
        return session, ""
    try:
        return await asyncio.wait_for(sessions.find_anonymous(), 2.5), ""
    except (ServerError, TransportError, asyncio.TimeoutError) as error:
        return None, f"{sessions.addresses.management} does not respond: {error!r}"


def _build_failure(text: str) -> None:
    with ui.column().classes("content").props('role="main"'):
        ui.label("Torchrelay").classes("page-title").props('role="heading" aria-level="1"')
        ui.label(text).classes("banner").props('role="alert"')
        ui.button("Try again", on_click=ui.navigate.reload)


def use_theme(request: Request) -> ui.dark_mode:
    """Apply the style and the theme that the browser has chosen, or that of its system."""
    ui.add_css(_STYLE)
    ui.colors(
        primary="#17507f", secondary="#4a5560", positive="#1c6b45", negative="#a32638", accent="#6b4ea3"
    )
    return ui.dark_mode(_THEMES.get(request.cookies.get("theme", "")))


def _build_frame(view: View, request: Request, path: str) -> ui.column:
    """Add header and navigation; return the column of the page's contents."""
    dark = use_theme(request)

    def switch_theme() -> None:
        dark.set_value(not dark.value)
        name = "dark" if dark.value else "light"
        where = view.prefix or "/"
        ui.run_javascript(f'document.cookie = "theme={name};path={where};max-age=31536000;samesite=strict"')

    with ui.header().classes("items-center header"):
        menu = ui.button(icon="menu").props('flat color=white aria-label="Navigation"')
        ui.link("Torchrelay", view.url("/")).classes("brand")
        ui.space()
        if view.session.name:
            ui.label(view.session.name).classes("key-name")
        ui.button(icon="contrast", on_click=switch_theme).props('flat color=white aria-label="Dark or light"')
        if view.session.access["required"]:
            ui.button(icon="logout", on_click=lambda: view.go("/logout")).props(
                'flat color=white aria-label="Log out"'
            )
    with ui.left_drawer(bordered=True).classes("drawer").props("width=210 breakpoint=800") as drawer:
        with ui.element("nav").props('aria-label="Pages"').classes("w-full"):
            for target, text, icon in _NAVIGATION:
                current = path == target or (target != "/" and path.startswith(target))
                with ui.link(target=view.url(target)).classes(
                    "nav-link" + (" current" if current else "")
                ) as item:
                    ui.icon(icon).props('aria-hidden="true"')
                    ui.label(text)
                if current:
                    item.props('aria-current="page"')
        ui.space()
        with ui.element("nav").props('aria-label="API"'):
            # Behind the management port its page has the same host, else that of the server.
            origin = view.prefix.removesuffix("/ui") if view.prefix else view.session.addresses.management
            ui.link("API documentation", f"{origin}/docs")
        ui.label(f"Version {__version__}").classes("note")
    menu.on_click(drawer.toggle)
    return ui.column().classes("content").props('role="main"')


def _build_model_head(view: View, model: str, section: str) -> None:
    with ui.row().classes("items-baseline"):
        ui.label(model).classes("page-title").props('role="heading" aria-level="1"')
    with ui.element("nav").classes("sections").props('aria-label="Sections of the model"'):
        for suffix, text in _MODEL_SECTIONS:
            item = ui.link(text, view.url(f"/models/{model}{suffix}"))
            if suffix == section:
                item.classes("current").props('aria-current="page"')


def run_in_page(work: Awaitable[Any]) -> None:
    """Run a coroutine that outlives its event handler, such as a stream."""

    async def run() -> None:
        with suppress(asyncio.CancelledError):
            await work

    background_tasks.create(run())
