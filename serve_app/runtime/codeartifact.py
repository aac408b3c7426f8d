"""Package indexes of AWS CodeArtifact, named by the ARN of a repository.

A token is valid for twelve hours at most, so each installation requests its own, with the credentials of the
environment: variables, a container's role or an instance's. AWS_ENDPOINT_URL_CODEARTIFACT names another
endpoint, such as that of a VPC.
"""

from __future__ import annotations

import re
from urllib.parse import quote, urlsplit

_ARN = re.compile(
    r"arn:[\w-]+:codeartifact:(?P<region>[\w-]+):(?P<owner>\d{12}):repository/(?P<domain>[^/]+)/(?P<name>.+)"
)
_TIMEOUT_S = 10


class CodeArtifactError(Exception):
    """A repository whose index cannot be used, with the reason."""


def is_arn(value: str) -> bool:
    return value.startswith("arn:")


def check_arn(value: str) -> re.Match[str]:
    """Return the parts of a repository's ARN. Raises CodeArtifactError."""
    parts = _ARN.fullmatch(value)
    if parts is None:
        raise CodeArtifactError(
            f"{value} is no repository of CodeArtifact, which is "
            "arn:aws:codeartifact:REGION:ACCOUNT:repository/DOMAIN/REPOSITORY"
        )
    return parts


def authorized_index(arn: str) -> str:
    """Return the URL of a repository's index, with a new token. Raises CodeArtifactError."""
    parts = check_arn(arn)
    try:
        import botocore.session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise CodeArtifactError(f"{arn} needs botocore: pip install 'torchrelay[s3]'") from None
    limits = Config(
        connect_timeout=_TIMEOUT_S,
        read_timeout=_TIMEOUT_S,
        retries={"total_max_attempts": 3, "mode": "standard"},
    )
    domain = {"domain": parts["domain"], "domainOwner": parts["owner"]}
    try:
        client = botocore.session.get_session().create_client(
            "codeartifact", region_name=parts["region"], config=limits
        )
        token = client.get_authorization_token(**domain)["authorizationToken"]
        endpoint = client.get_repository_endpoint(**domain, repository=parts["name"], format="pypi")
    except (BotoCoreError, ClientError, ValueError) as error:
        raise CodeArtifactError(
            f"{arn}: CodeArtifact gives no token for it: {error}. The role needs "
            "codeartifact:GetAuthorizationToken, codeartifact:GetRepositoryEndpoint, "
            "codeartifact:ReadFromRepository and sts:GetServiceBearerToken."
        ) from None
    url = urlsplit(endpoint["repositoryEndpoint"])
    return f"{url.scheme}://aws:{quote(token, safe='')}@{url.netloc}{url.path.rstrip('/')}/simple/"
