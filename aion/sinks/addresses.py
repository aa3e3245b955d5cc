"""Addresses of databases and lakes, with the texts in them that nobody may see. Pure.

A URI is parsed once. What is shown of it has no password, and an error of a driver that repeats one is said without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from aion.errors import AionError, ConfigError, SinkError

_SECRET = re.compile(r"secret|pass|pwd|token|key|credential|sas|signature|auth", re.IGNORECASE)
"""Options with such a word in their name are secrets."""
_PLAIN = {"host", "hostaddr", "port", "dbname", "options", "sslmode", "application_name", "client_encoding"}
"""The parameters of a URI that errors may show."""
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*")
_HIDDEN = "***"
_SHORT = 4
"""A shorter secret is hidden only where it is a word of its own: otherwise no error could be read."""


@dataclass(frozen=True, repr=False)
class Secret:
    """A text that no ``repr`` shows."""

    text: str

    def __repr__(self) -> str:
        return repr(_HIDDEN)


@dataclass(frozen=True, repr=False)
class Address:
    """A URI, or the name of a table. ``str`` and ``repr`` show it without user, password and parameters.

    ``scheme``: in small letters; empty without one. ``secret``: the whole URI, for a driver.
    """

    scheme: str
    shown: str
    secret: Secret
    secrets: tuple[Secret, ...]

    @classmethod
    def of(cls, text: str) -> Address:
        """Parses a URI. A text without a scheme has no secrets."""
        scheme, _, rest = text.partition("://")
        if not rest or not _SCHEME.fullmatch(scheme):
            return cls("", text, Secret(text), ())
        rest, _, parameters = rest.partition("?")
        # A password may have an "@" or a "/" that should have been written otherwise. A path has none in front.
        credentials, _, place = ("", "", rest) if rest.startswith("/") else rest.rpartition("@")
        secrets = [text, credentials.partition(":")[2], parameters]
        # A name that is not known may be the rest of a password with a "&".
        named = (each.partition("=") for each in parameters.split("&"))
        secrets += [part for name, _, value in named if name not in _PLAIN for part in (name, value)]
        return cls(
            scheme.lower(),
            f"{scheme.lower()}://{place}",
            Secret(f"{scheme.lower()}://{text.partition('://')[2]}"),
            tuple(Secret(one) for part in secrets if part for one in dict.fromkeys([part, unquote(part)])),
        )

    @property
    def without_password(self) -> str:
        """A URI with which one can connect if the environment has the password: with the user, and with the
        parameters that are known not to be secret.
        """
        rest, _, parameters = self.secret.text.partition("://")[2].partition("?")
        user = "" if rest.startswith("/") else rest.rpartition("@")[0].partition(":")[0]
        plain = [each for each in parameters.split("&") if each.partition("=")[0] in _PLAIN]
        scheme, _, place = self.shown.partition("://")
        return f"{scheme}://{user and user + '@'}{place}{'?' if plain else ''}{'&'.join(plain)}"

    def __str__(self) -> str:
        return self.shown

    def __repr__(self) -> str:
        return repr(self.shown)


def secrets_in(options: Mapping[str, str]) -> tuple[Secret, ...]:
    """Returns the values of options that are secrets: by their names, and what is secret in a URI."""
    named = tuple(Secret(value) for name, value in options.items() if _SECRET.search(name) and value)
    return named + tuple(secret for value in options.values() for secret in Address.of(value).secrets)


def plain(name: str, value: str) -> str:
    """Returns the value of an option without its password. A value that is a secret as a whole becomes empty."""
    address = Address.of(value)
    return "" if _SECRET.search(name) else address.without_password if address.scheme else value


def without_secrets(secrets: tuple[Secret, ...], call: Callable[[], None]) -> None:
    """Calls a function whose errors show no secret. One that has some becomes a SinkError, or stays one of Aion's."""
    try:
        return call()
    except BaseException as error:
        texts = [str(one) for one in _chain(error)]
        if not any(_pattern(secret).search(text) for secret in secrets for text in texts):
            raise
        kind = type(error)
    text = hidden(texts[0], secrets)
    # Here, and not above: the error must not carry the one with the secret.
    raise kind(text) if issubclass(kind, AionError) else SinkError(f"{kind.__name__}: {text}")


def hidden(text: str, secrets: tuple[Secret, ...]) -> str:
    """Returns a text with stars in the place of secrets."""
    for secret in sorted(secrets, key=lambda each: -len(each.text)):
        text = _pattern(secret).sub(_HIDDEN, text)
    return text


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _pattern(secret: Secret) -> re.Pattern[str]:
    text = re.escape(secret.text)
    return re.compile(text if len(secret.text) >= _SHORT else rf"(?<!\w){text}(?!\w)")


def check_libpq(address: Address) -> None:
    """Raises ConfigError if libpq would read a URI otherwise than it was meant, and say parts of a password."""
    rest = address.secret.text.partition("://")[2]
    before, _, parameters = rest.partition("?")
    if re.search(r"%(?![0-9a-fA-F]{2})", rest):
        wrong = "has a '%' that does not begin two hexadecimal digits; write %25"
    elif before.count("@") > 1 or "@" in before.partition("/")[2]:
        wrong = "has an '@' or a '/' where a password cannot have one; write %40 and %2F"
    elif re.search(r"[\s\[\]#]", re.sub(r"\[[0-9a-fA-F:.]*\]", "", before)):
        wrong = "has a character that a URI cannot have; write it as % and two hexadecimal digits"
    elif not all(re.fullmatch(r"[^:]*(:\d*)?", host) for host in _hosts(before)):
        wrong = "has a port that is no number; in a password write '/' as %2F and '?' as %3F"
    elif parameters and not all(re.fullmatch(r"[^=]+=[^=]*", each) for each in parameters.split("&")):
        wrong = "has a parameter that is not name=value; in a value write '&' as %26 and '=' as %3D"
    else:
        return
    raise ConfigError(f"uri: the URI of {address.scheme} (not shown, since it may hold a password) {wrong}")


def _hosts(before: str) -> list[str]:
    hosts = before.partition("/")[0].rpartition("@")[2]
    return re.sub(r"\[[^\]]*\]", "", hosts).split(",")
