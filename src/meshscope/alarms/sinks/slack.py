"""Alarms as messages that Slack takes, and whatever else takes its incoming webhooks."""

import json
from pathlib import Path

from meshscope.alarms.settings import HookSettings
from meshscope.alarms.sinks.log import describe_price
from meshscope.alarms.sinks.webhook import WebhookSink
from meshscope.core.verdict.severity import Severity
from meshscope.report.alarm_event import AlarmEvent, EventKind

_COLORS = {
    Severity.CRITICAL: "#b00020",
    Severity.HIGH: "#e8590c",
    Severity.MEDIUM: "#f2b134",
    Severity.LOW: "#868e96",
}
_CLEARED = "#2b8a3e"


def make_slack_sink(settings: HookSettings, run: Path) -> WebhookSink:
    return WebhookSink(settings, run, name="slack", format_event=format_message)


def format_message(event: AlarmEvent) -> bytes:
    """`text` for notifications, one attachment with the rest."""
    is_over = event.event is EventKind.CLEARED
    head = f"{'Cleared' if is_over else event.severity.word.capitalize()}: {event.title}"
    price = describe_price(event)
    fields = [
        ("Run", event.name),
        ("Where", ", ".join(event.hosts[:4])),
        ("Saves", "" if is_over else price),
        ("Step", "" if event.step is None else str(event.step)),
        ("Rule", event.code),
    ]
    text = event.reason if is_over else f"{event.summary}\n{event.change}".strip()
    message = {
        "text": _escape(f"{head} ({event.name})"),
        "attachments": [
            {
                "color": _CLEARED if is_over else _COLORS[event.severity],
                "fallback": _escape(head),
                "text": _escape(text),
                "fields": [
                    {"title": title, "value": _escape(value), "short": True}
                    for title, value in fields
                    if value
                ],
                "ts": event.told_unix_ns // 1_000_000_000,
            }
        ],
    }
    return json.dumps(message).encode()


def _escape(text: str) -> str:
    """Names from a run must not mention people or make links."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
