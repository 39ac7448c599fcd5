"""Compare this machine's clock with the server's: Flower refuses signatures of a clock that is off."""

import email.utils
import http.client
import ssl
import time
from pathlib import Path

AHEAD, BEHIND = 5.0, 300.0  # seconds that Flower tolerates
WRONG_TIME = (9, 10)  # OpenSSL: the certificate is not valid yet, or not any more


def seconds_ahead(address: str, authority: Path | None) -> float | None:
    """How far this machine's clock is ahead of the server's, by the Date header of a reply; None if there is no reply.

    `authority` is the certificate that the site trusts, None without encryption.
    """
    try:
        context = None if authority is None else ssl.create_default_context(cafile=authority)
        return _seconds_ahead(address, context)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code not in WRONG_TIME:
            return None
    except (OSError, http.client.HTTPException):
        return None
    # By this machine's clock the certificate is not valid. The answer is used for a sentence in the log only.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        return _seconds_ahead(address, context)
    except (OSError, http.client.HTTPException):
        return None


def _seconds_ahead(address: str, context: ssl.SSLContext | None) -> float | None:
    kinds = {"timeout": 10} if context is None else {"timeout": 10, "context": context}
    connection = (http.client.HTTPConnection if context is None else http.client.HTTPSConnection)(address, **kinds)
    try:
        connection.request("HEAD", "/health")
        date = email.utils.parsedate_to_datetime(connection.getresponse().getheader("Date") or "")
    except (TypeError, ValueError):
        return None
    finally:
        connection.close()
    return time.time() - date.timestamp()


def explanation(address: str, authority: Path | None) -> str:
    """A sentence if the clock is so far off that the server refuses this site; else empty."""
    ahead = seconds_ahead(address, authority)
    if ahead is None or -BEHIND <= ahead <= AHEAD:
        return ""
    direction = "ahead of" if ahead > 0 else "behind"
    return (
        f"this machine's clock is {abs(ahead):.0f} s {direction} the server's; set the clock (the server accepts {AHEAD:.0f} s "
        f"ahead to {BEHIND:.0f} s behind)"
    )
