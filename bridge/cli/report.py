"""``kakeya_mac report``: judged requests as one page, for people who read no JSON."""

from __future__ import annotations

from pathlib import Path

import click

from bridge import settings
from bridge.cli import show, write_text
from bridge.cli.compare import compare_judged, fetch_judged, verdict_lines
from bridge.cli.completion import complete_handle
from bridge.cli.options import allow_unsigned_option, json_option, path_option, remote_option
from bridge.cli.output import connect
from bridge.client.fetch import Judged
from bridge.errors import BridgeError
from bridge.evidence.gate import judge_file
from bridge.github.comment import put_comment
from bridge.render.evidence import MOST_CHARACTERS, shortened
from bridge.render.report import ReportSubject, html, markdown

MOST = 8  # requests and files on a page
_COMMENT = 60_000  # characters; GitHub's limit of a comment is 65,536


@click.command(
    epilog="""\b
Examples:
  kakeya_mac report 20260301t120000z0123456789ab -o report.html
  kakeya_mac report 20260302t12 20260301t12 -o comparison.html
  kakeya_mac report --file report.json -o report.html
  kakeya_mac report 20260301t12 --format markdown >> "$GITHUB_STEP_SUMMARY"

The page is one file of at most 2 MB that loads nothing and runs no script.

Exit code 0: the page was made, whatever the verdict is; 3: a result is not believed; 4: no result yet;
6: the comment could not be written."""
)
@click.argument("handles", metavar="[HANDLE]...", nargs=-1, shell_complete=complete_handle)
@path_option("-o", "--output", metavar="PAGE", text="Write the page to this file, in place of one there.")
@path_option("--file", "files", metavar="FILE", multiple=True, text="An evidence file; repeatable.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["html", "markdown"]),
    help="Default: html with -o, else markdown.",
)
@click.option(
    "--comment",
    type=click.IntRange(1),
    metavar="NUMBER",
    help="Put the Markdown into the one comment on this pull request, too (GitHub; needs a token).",
)
@remote_option
@json_option
@allow_unsigned_option
def report(
    handles: tuple[str, ...],
    output: Path | None,
    files: tuple[Path, ...],
    kind: str | None,
    comment: int | None,
    remote: str | None,
    as_json: bool,
    allow_unsigned: bool,
) -> int:
    """Show finished requests as a page: verdict and broken rules, then figures and where they come from.

    Several are compared, with the verdict of `compare` where its conditions hold. With --file evidence on
    this machine is shown, as the gate that is installed here judges it.
    """
    if not 1 <= len(handles) + len(files) <= MOST:
        raise click.UsageError(f"Give from one to {MOST} handles, or evidence files with --file.")
    judged, address = [], None
    if handles or comment is not None:  # files need neither a checkout nor a remote
        link = connect(settings.load(remote=remote, allow_unsigned=allow_unsigned or None))
        address = link.bus.address
        judged = [fetch_judged(link, handle) for handle in handles]
    subjects = [ReportSubject(each.believed.result.nonce, each.judgements, each) for each in judged]
    subjects += [ReportSubject(str(path), {path.name: judge_file(path)}) for path in files]
    compared = [line for other in judged[1:] for line in _compare(judged[0], other)]
    kind = kind or ("markdown" if output is None else "html")
    text = markdown(subjects, compared)
    page = html(subjects, compared) if kind == "html" else shortened(text, MOST_CHARACTERS)
    if output is not None:
        write_text(output, page)
    text = shortened(text, _COMMENT)
    document = {
        "status": "reported",
        "handles": [each.believed.result.nonce for each in judged],
        "verdicts": {each.believed.result.nonce: each.verdict.status for each in judged},
        "format": kind,
        "output": output and str(output),
        "markdown": text,
        "comment": None if comment is None or address is None else put_comment(address, comment, text),
        "exit_code": 0,
    }
    return show(as_json, document, [page] if output is None else [], untrusted=("markdown",))


def _compare(own: Judged, other: Judged) -> list[str]:
    """What `compare` says of the two, or why it says nothing."""
    try:
        return list(verdict_lines(own, other, compare_judged(own, other)))
    except BridgeError as error:
        return [
            f"{own.believed.result.nonce} is not compared with {other.believed.result.nonce}: {error.message}"
        ]
