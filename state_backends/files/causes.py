"""Says in a sentence why a store of files was not reached, or refused, and what to do. Pure.

The stores say it in codes, and each client in another way.
"""

from __future__ import annotations

import re

_CAUSES = (
    (
        r"curlCode: 6\b|resolve host|Name or service not known|EndpointResolution",
        "no host has the name of the endpoint: check endpoint_override in the URI, and the network of this host",
    ),
    (
        r"NETWORK_CONNECTION|REQUEST_TIMEOUT|[Cc]ould ?n[o']t connect|Connection refused|ConnectTimeout|timed out",
        "the endpoint does not answer: check endpoint_override and scheme in the URI, and the network of this host",
    ),
    (
        r"NO_SUCH_BUCKET|NoSuchBucket",
        "there is no such bucket: make it, or correct the URI",
    ),
    (
        r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint",
        "the bucket is in another region: write region=... into the URI",
    ),
    (
        r"ExpiredToken|EXPIRED_TOKEN|TokenRefreshRequired|RequestExpired",
        "the credentials of this host have expired: renew them",
    ),
    (
        r"INVALID_ACCESS_KEY_ID|InvalidAccessKeyId|SIGNATURE_DOES_NOT_MATCH|SignatureDoesNotMatch"
        r"|INVALID_CLIENT_TOKEN_ID|UNRECOGNIZED_CLIENT|InvalidToken|UNAUTHENTICATED",
        "the store does not know the credentials of this host: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
        "there, or the role of the instance",
    ),
    (
        r"Unable to locate credentials|NoCredentials|MISSING_AUTHENTICATION_TOKEN|could not find default credentials",
        "this host has no credentials: put them into its environment, or give the instance a role",
    ),
    (
        r"ACCESS_DENIED|AccessDenied|PERMISSION_DENIED|Permission denied|Forbidden|\b403\b",
        "the credentials of this host have no right to do this: they must be allowed to list, read, write and delete "
        "there",
    ),
    (
        r"SLOW_DOWN|SlowDown|THROTTLING|ServiceUnavailable|SERVICE_UNAVAILABLE",
        "the store asks for fewer requests: try again later, or use fewer shards",
    ),
    (
        r"libhdfs|libjvm|CLASSPATH",
        "HDFS needs Java and the libraries of Hadoop on this host: set JAVA_HOME, HADOOP_HOME and CLASSPATH",
    ),
)


def told(text: str) -> str:
    """Returns what a client said, after a sentence with the cause and what to do if the cause is known."""
    said = next((sentence for pattern, sentence in _CAUSES if re.search(pattern, text)), None)
    return text if said is None else f"{said} ({text})"
