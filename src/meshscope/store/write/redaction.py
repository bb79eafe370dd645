"""What of a command line or a configuration may be stored: values of shapes known to be harmless.

A value is stored as it is when its name does not say that it is a secret and it looks like a
number, a short word, a path, a list of those, or an address without user and query. Of anything
else only that it was given is stored. A secret that looks like a word and stands under an ordinary
name, or under none, cannot be told from a word: it is stored.

Doubt hides: an ordinary value that is hidden costs a line of a comparison. Standard library only.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from urllib.parse import parse_qsl, urlsplit

HIDDEN = "(hidden)"
_MAX_TEXT = 1000
_MAX_DEPTH = 8

_SECRET_WORDS = frozenset((
    "auth", "authentication", "authorization", "bearer", "cookie", "cookies", "cred", "creds",
    "credential", "credentials", "dsn", "header", "headers", "jwt", "oauth", "otp", "pass",
    "passcode", "passphrase", "passwd", "password", "passwords", "pat", "pw", "pwd", "secret",
    "secrets", "signature", "webhook", "webhooks",
))  # fmt: skip
_SECRET_PARTS = re.compile(
    r"passw|passphrase|passkey|secret|credential|bearer|oauth|apikey|accesskey|privatekey|authkey|"
    r"(?:api|access|auth|hub|hf|bot|refresh|id|private|personal)tokens?$"
)
"""Found in a name without its separators, so that `dbPassword` and `hftoken` count."""
_ACCESS_WORDS = frozenset((
    "access", "account", "api", "auth", "encryption", "hf", "hub", "private", "ssh", "wandb",
))  # fmt: skip
"""Before `key` or `token` they make a secret of it, also as `access_key_id`."""
_WEAK_WORDS = frozenset(("key", "keys", "token", "tokens"))
"""Secrets as often as something to count or to look up."""
_LOOKUP_WORDS = frozenset((
    "additional", "begin", "bos", "caption", "cls", "column", "decoder", "end", "eos", "extra",
    "feature", "group", "image", "input", "join", "label", "mask", "media", "metric", "monitor",
    "output", "pad", "per", "pooling", "prompt", "sep", "sequence", "sort", "special", "start",
    "stop", "target", "text", "unk", "video",
))  # fmt: skip
"""`pad_token` and `sort_key` are words of the program."""
_ASPECT_WORDS = frozenset((
    "choice", "column", "dropout", "dtype", "embedding", "embeddings", "field", "file", "folder",
    "format", "heads", "initializer", "level", "mapping", "merging", "mixing", "mode", "name",
    "norm", "padding", "parallel", "path", "pooling", "position", "positions", "reduction",
    "routing", "sampling", "scheme", "selection", "shift", "strategy", "type",
))  # fmt: skip
"""`token_type` is not a token."""
_PUBLIC_WORDS = frozenset(("commit", "hash", "revision", "sha"))
"""Names under which long hexadecimal numbers are no secrets."""

_NUMBER = re.compile(
    r"[+-]?(?=\.?\d)(?:\d[\d_]{0,15})?(?:\.\d{0,16})?(?:[eE][+-]?\d{1,3})?[A-Za-z%]{0,3}"
)
_NUMBERS = re.compile(r"\d{1,6}(?:[x:/-]\d{1,6}){1,7}")
_SWITCH = re.compile(r"true|false|yes|no|on|off|none|null", re.IGNORECASE)
_WORD = re.compile(r"[^\W_][\w.-]{0,63}|_[\w.-]{1,63}")
_BRACKETED = re.compile(r"<[/|]?\w{1,24}\|?>|\[[A-Z]{1,12}\]")
_PATH = re.compile(r"~?/{0,2}(?:[\w.*?-]{1,255}(?:/|$))*")
_NUMBER_RANGE = re.compile(r"\{\d{1,9}\.\.\d{1,9}\}")
_ENDPOINT = re.compile(r"(?:[\w.-]{1,253}|\[[\da-fA-F:]{2,39}\]):\d{1,5}")
_OPENING = tuple('{[("')
_ASSIGNMENT = re.compile(r"([+~]{0,2}(?:[^\W\d]|_)[\w.@/-]{0,127})=(.*)", re.DOTALL)
_OPTION = re.compile(r"--?[A-Za-z][\w.-]{0,63}")
_KNOWN_SECRETS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{12,}|"
    r"(?:sk|pk|rk|gh[pousr]|github_pat|glpat|npm|pypi|dckr_pat|xox[a-z])[-_](?=[\w-]*\d)[\w-]{12,}|"
    r"A[KS]IA[0-9A-Z]{12,}|AIza[\w-]{20,}|eyJ[\w-]{8,}|"
    r"[\da-fA-F]{8}(?:-[\da-fA-F]{4}){3}-[\da-fA-F]{12})"
)
_LONG_RUN = re.compile(r"[A-Za-z0-9]{16,}")
_RUN_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_MIN_PART_CHARACTERS = 3.0
"""Mean length of a run's parts (`Causal`, `LM`, `128`): words have more, random characters less."""
_HIDING_LETTERS = frozenset("akpstuwHPU")
"""One-letter options that programs take secrets by: -a, -k, -p, -t, -u user:password, -H header."""
_PASSWORD_OPTIONS = ("-p", "-P")
"""Under the others short numbers are kept: seeds, threads, sizes."""
_P_OPTIONS = frozenset((
    "params", "path", "port", "pp", "precision", "prefix", "print", "profile", "project",
))  # fmt: skip


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line as it may be stored: program first, options and their values."""
    return [*arguments[:1], *_redact_rest(arguments[1:])]


def _redact_rest(arguments: Sequence[str]) -> Iterator[str]:
    name = ""  # of the option that this argument may be the value of
    for argument in arguments:
        if name and _is_secret_name(name) and not argument.startswith("--"):
            yield _show(argument, name) if not argument.startswith("-") else HIDDEN
            name = name if _split_name(name)[-1:] in (["keys"], ["tokens"]) else ""
            continue
        option, equals, value = argument.partition("=")
        if argument in ("-", "--"):
            yield argument
        elif _NUMBER.fullmatch(argument):  # also a negative one
            yield _show(argument, name)
            name = ""
        elif option.startswith("-"):
            name = "" if value else option
            yield _show_option(option) + (f"={_show(value, option)}" if equals else "")
        else:
            yield _show(argument, name)
            name = ""


def redact_settings(value: object, name: str = "") -> object:
    """A configuration (mappings, lists, plain values) as it may be stored; other objects as text.

    `name` is what the value is known by; names within mappings count by themselves.
    """
    return _redact_value(value, name, 0)


def _redact_value(value: object, name: str, depth: int) -> object:
    if depth > _MAX_DEPTH:
        return HIDDEN
    if isinstance(value, Mapping):
        return {str(key): _redact_value(inner, str(key), depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact_value(inner, name, depth + 1) for inner in value]
    if value is None or isinstance(value, bool):
        return value
    text = value if isinstance(value, str) else _describe(value)
    shown = _show(text, name)
    return value if shown == text and isinstance(value, (str, int, float)) else shown


def _describe(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - any object of the program's
        return f"<{type(value).__name__}>"


def _show(text: str, name: str) -> str:
    """The value of `name` (empty if it has none), or what may be stored of it."""
    if text in ("", HIDDEN) or (_is_secret_name(name) and _SWITCH.fullmatch(text)):
        return text
    assigned = _ASSIGNMENT.fullmatch(text)
    if len(text) > _MAX_TEXT or _is_secret(name, text):
        return HIDDEN
    if all(map(_BRACKETED.fullmatch, text.split(","))):
        return text
    if text[0] in _OPENING:
        return _show_nested(text, name)
    if "://" in text:
        return _show_address(text, name)
    if assigned and ("," not in text or assigned[2][0] in _OPENING):
        return f"{assigned[1]}={_show(assigned[2], assigned[1])}"
    if "," in text:
        return ",".join(_show(part, name) for part in text.split(","))
    words = text.split()
    is_spoken = len(words) == 1 or not any(map(_is_secret_name, words))
    return text if is_spoken and all(_is_harmless(word, name) for word in words) else HIDDEN


def _show_nested(text: str, name: str) -> str:
    """JSON by its keys, or a flat list of values."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        inner = text[1:-1]
        is_list = text[0] + text[-1] in ("[]", "()") and not set(inner) & set("[](){}")
        return f"{text[0]}{_show(inner, name)}{text[-1]}" if is_list else HIDDEN
    redacted = _redact_value(found, name, 0)
    return text if redacted == found else json.dumps(redacted)


def _show_address(text: str, name: str) -> str:
    """Scheme, host and path; of user, password and query that they were given."""
    try:
        parts = urlsplit(text)
        query = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        return HIDDEN
    user, at, host = parts.netloc.rpartition("@")
    if not re.fullmatch(r"[a-z][a-z0-9+.-]{0,24}", parts.scheme) or (
        host and not re.fullmatch(r"[\w.-]+(:\d{1,5})?|\[[\da-fA-F:]+\](:\d{1,5})?", host)
    ):
        return HIDDEN
    segments = [
        part if not part or _is_harmless(part, name) else HIDDEN for part in parts.path.split("/")
    ]
    shown = f"{parts.scheme}://{HIDDEN + '@' if at and user else ''}{host}{'/'.join(segments)}"
    shown += "?" + "&".join(f"{key}={HIDDEN}" for key, _ in query) if query else ""
    return shown + (f"#{HIDDEN}" if parts.fragment else "")


def _show_option(option: str) -> str:
    """An option's name; of a password that is attached to a letter (`-pX`) only the letter."""
    letters = option.lstrip("-")
    if option.startswith("-p") and letters not in _P_OPTIONS and len(letters) > 1:
        return f"-p{HIDDEN}"
    is_name = _OPTION.fullmatch(option) and not _looks_random(option)
    return option if is_name else f"-{HIDDEN}"


def _is_harmless(word: str, name: str) -> bool:
    if any(shape.fullmatch(word) for shape in (_NUMBER, _NUMBERS, _SWITCH, _BRACKETED, _ENDPOINT)):
        return True
    if not (_WORD.fullmatch(word) or _PATH.fullmatch(_NUMBER_RANGE.sub("0", word))):
        return False
    is_public = bool(_PUBLIC_WORDS & set(_split_name(name))) and len(word) <= 64
    return is_public or not _looks_random(word)


def _looks_random(word: str) -> bool:
    """Whether a word has a known secret's prefix, or a long run of characters in no order."""
    if _KNOWN_SECRETS.search(word):
        return True
    return any(
        sum(map(len, parts)) / len(parts) < _MIN_PART_CHARACTERS
        for run in _LONG_RUN.findall(word)
        if not run.isdigit() and (parts := _RUN_PARTS.findall(run))
    )


def _is_secret(name: str, value: str) -> bool:
    """Whether a value may be a secret by what it is called; numbers are often only counted."""
    words = _split_name(name)
    if not _is_secret_name(name):
        return False
    is_number = bool(_NUMBER.fullmatch(value))
    if len(name) == 2:
        return name in _PASSWORD_OPTIONS or not (is_number and len(value) <= 6)
    is_counted = is_number and len(value) <= 16 and words[-1] not in ("key", "token")
    return _is_strong(name, words) or not is_counted


def _is_secret_name(name: str) -> bool:
    """Whether values of that name may be secrets, numbers among them or not."""
    words = _split_name(name)
    if _is_strong(name, words):
        return True
    weak = [index for index, word in enumerate(words) if word in _WEAK_WORDS]
    if not weak:
        return any(word.endswith(("token", "apikey")) for word in words)
    around = set(words[: weak[-1]]) | set(words[weak[-1] + 1 :])
    return not (set(words[: weak[-1]]) & _LOOKUP_WORDS or around & _ASPECT_WORDS)


def _is_strong(name: str, words: list[str]) -> bool:
    if name.startswith("-") and len(name) == 2:
        return name[1] in _HIDING_LETTERS
    if set(words) & _SECRET_WORDS or _SECRET_PARTS.search("".join(words)):
        return True
    return any(
        first in _ACCESS_WORDS and second in _WEAK_WORDS for first, second in pairwise(words)
    )


def _split_name(name: str) -> list[str]:
    """`--hfHubToken` and `hub.hf_token` as words in lower case; of a dotted name, all of them."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return [word.lower() for word in re.split(r"[\W_]+", spaced) if word]
