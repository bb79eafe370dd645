"""The screen as an application of Textual: keys, a timer and two threads that read the run."""

import threading

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from meshscope.errors import MeshscopeError
from meshscope.watch.screen import View, draw_screen, move_selection
from meshscope.watch.watched import Watched

REFRESH_S = 0.25
"""At most four times a second."""
_POLL_S = 0.5
_LOOK_S = 0.5
_BACK = {"enter": "rank", "f": "findings", "question_mark": "keys"}
"""Keys that show something else, and the run when pressed again."""


class RunScreen(Widget):
    """All of the terminal."""

    DEFAULT_CSS = "RunScreen { width: 100%; height: 100%; }"

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.watched = watched
        self.view = View()
        self._lines: list[Text] = []

    def redraw(self) -> None:
        """Sends the lines that changed: a terminal may be far away."""
        lines = draw_screen(self.watched, self.view, *self.size)
        width, old = self.size.width, self._lines
        changed = [
            Region(0, y, width, 1)
            for y, line in enumerate(lines)
            if y >= len(old) or old[y] != line
        ]
        self._lines = lines
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        line = self._lines[y] if y < len(self._lines) else Text()
        return Strip(line.render(self.app.console)).adjust_cell_length(self.size.width)

    def on_resize(self) -> None:
        self._lines = []
        self.redraw()


class WatchApp(App[None]):
    """`meshscope watch`."""

    ENABLE_COMMAND_PALETTE = False
    CSS = "Screen { background: black; overflow: hidden; }"

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.watched = watched
        self.run_screen = RunScreen(watched)
        self.error: MeshscopeError | None = None
        """Why the application ended, where it did by itself."""
        self._is_over = threading.Event()

    def compose(self) -> ComposeResult:
        yield self.run_screen

    def on_mount(self) -> None:
        self.set_interval(REFRESH_S, self._redraw)
        for work in (self._follow, self._analyze):
            self.run_worker(work, thread=True, exit_on_error=False)

    def on_unmount(self) -> None:
        self._is_over.set()

    def _redraw(self) -> None:
        if self.error is not None:
            self.exit()
        if not self.run_screen.view.is_paused:
            self.run_screen.redraw()

    def _follow(self) -> None:
        while not self._is_over.is_set():
            try:
                self.watched.poll()
            except MeshscopeError as error:
                self.error = error
                return
            self._is_over.wait(_POLL_S)

    def _analyze(self) -> None:
        while not self._is_over.is_set():
            try:
                if self.watched.moment is not None:
                    self.watched.analyze()
            except MeshscopeError as error:
                self.watched.problem = str(error)
            self._is_over.wait(_LOOK_S)

    def on_key(self, event: events.Key) -> None:
        view = self.run_screen.view
        match event.key:
            case "q" | "ctrl+c":
                self.exit()
            case "escape":
                view.mode, view.scroll = "run", 0
            case "up" | "down":
                change = -1 if event.key == "up" else 1
                if view.mode == "run":
                    move_selection(self.watched, view, change, self.run_screen.size)
                else:
                    view.scroll += change
            case "m":
                self.watched.switch_metric()
            case "p":
                view.is_paused = not view.is_paused
            case key if key in _BACK:
                view.mode = "run" if view.mode == _BACK[key] else _BACK[key]
                view.scroll = 0
            case _:
                return
        event.stop()
        self.run_screen.redraw()
