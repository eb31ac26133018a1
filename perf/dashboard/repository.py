"""Address of the repository on the web, to which the page links its commits."""

from __future__ import annotations

import re
import subprocess
from urllib.parse import urlsplit


def find_repository() -> str:
    """Return the web address of the current folder's git remote; "" without git, or for another address."""
    try:
        process = subprocess.run(["git", "remote", "get-url", "origin"], capture_output=True, text=True)
    except OSError:  # git is not installed
        return ""
    return web_address(process.stdout.strip())


def web_address(url: str) -> str:
    """Convert a git remote's address to an https address without user and password; "" for one without a web
    page, as a folder's.

    >>> web_address("git@github.com:owner/project.git"), web_address("ssh://git@example.org:22/owner/project")
    ('https://github.com/owner/project', 'https://example.org/owner/project')
    >>> web_address("https://user:secret@example.org/owner/project.git/")
    'https://example.org/owner/project'
    >>> web_address("javascript:alert(1)"), web_address("/srv/project.git"), web_address("file:///srv/project")
    ('', '', '')
    """
    if re.match(r"https?://[^/]+/.", url):
        return re.sub(r"//[^@/]*@", "//", url).strip("/").removesuffix(".git")
    parts = re.fullmatch(r"(?:(?:ssh|git)://)?(?:[^@/]+@)?([\w.-]+\.\w+)(?::\d+)?[:/]([^:?#]+)", url)
    return f"https://{parts[1]}/{parts[2].strip('/').removesuffix('.git')}" if parts else ""


def compare_address(repository: str, before: str, after: str) -> str:
    """Return the address that compares two commits.

    >>> compare_address("https://github.com/owner/project", "12ab", "34cd")
    'https://github.com/owner/project/compare/12ab...34cd'
    >>> compare_address("https://gitlab.com/owner/project", "12ab", "34cd")
    'https://gitlab.com/owner/project/-/compare/12ab...34cd'
    """
    folder = "/-" if "gitlab" in (urlsplit(repository).hostname or "") else ""
    return f"{repository}{folder}/compare/{before}...{after}"
