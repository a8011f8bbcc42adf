"""``kakeya_mac completion``: the script that completes commands in a shell; and what values it offers.

Everything comes from files of this machine: a shell must not wait for a network.
"""

from __future__ import annotations

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

VARIABLE = "_KAKEYA_MAC_COMPLETE"
_PROGRAMS = ("kakeya_mac", "kakeya-mac")


@add_completion_class
class BashWords(BashComplete):
    """Bash takes ``name=value`` for three words, and adds a space to what it completes."""

    source_template = BashComplete.source_template.replace(
        "    return 0\n", "    [[ ${COMPREPLY[*]} == *= ]] && compopt -o nospace\n    return 0\n"
    )
    _typed = ""  # what of the current word bash does not count to it

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the current one, and that; joined as they were typed."""
        args, incomplete = super().get_completion_args()
        words: list[str] = []
        for word in (*args, incomplete):
            if words and words[-1] and (word == "=" or words[-1].endswith("=")):
                words[-1] += word
            else:
                words.append(word)
        if words[-1] != incomplete:
            self._typed = words[-1][: words[-1].rindex("=") + 1]
        return words[:-1], words[-1]

    def format_completion(self, item: CompletionItem[str]) -> str:
        """One line for the script: type and value."""
        return f"{item.type},{item.value.removeprefix(self._typed)}"


@add_completion_class
class ZshWords(ZshComplete):
    """Adds no space behind ``name=``."""

    source_template = (
        ZshComplete.source_template.replace(
            "    local -a response\n", "    local -a response\n    local -a unfinished\n"
        )
        .replace(
            '        if [[ "$type" == "plain" ]]; then\n',
            '        if [[ "$type" == "plain" && "$key" == *= ]]; then\n'
            '            unfinished+=("$key")\n'
            '        elif [[ "$type" == "plain" ]]; then\n',
        )
        .replace(
            '    if [ -n "$completions" ]; then\n',
            '    if [ -n "$unfinished" ]; then\n'
            "        compadd -U -S '' -V unfinished -a unfinished\n"
            "    fi\n\n"
            '    if [ -n "$completions" ]; then\n',
        )
    )


@click.command(
    epilog="""\b
Examples:
  eval "$(kakeya_mac completion bash)"                # in ~/.bashrc; bash 4.4 or later
  eval "$(kakeya_mac completion zsh)"                 # in ~/.zshrc, after compinit
  kakeya_mac completion fish | source                 # in ~/.config/fish/config.fish

Handles are those that this machine asked for or looked at lately, and presets of runners those that it saw
last; no remote is asked."""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print a script that completes commands, presets, parameters and handles in SHELL."""
    from bridge.cli import cli

    kind: type[ShellComplete] = {"bash": BashWords, "zsh": ZshWords, "fish": FishComplete}[shell]
    for program in _PROGRAMS:
        words = kind(cli, {}, program, VARIABLE)
        click.echo(words.source_template % words.source_vars())
    return 0


def complete_preset(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Presets that are installed here, and names of those that runners were last seen to offer."""
    from bridge import presets, settings
    from bridge.client.recent import recent_presets

    config = settings.load()
    known = presets.load_all(config.presets).values()
    items = [CompletionItem(each.name, help=each.summary) for each in known]
    answered = {name for each in known for name in (each.name, *each.aliases)}
    items += [CompletionItem(name) for name in recent_presets(config.state_dir) if name not in answered]
    return [item for item in items if item.value.startswith(incomplete)]


def complete_param(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Parameters of the command's preset, as ``name=``, or ``name=value`` where there are few values."""
    from bridge import presets, settings
    from bridge.client.recent import recent_presets

    config = settings.load()
    name = ctx.params.get("preset") or ("throughput" if ctx.info_name == "demo" else None)
    known = presets.load_all(config.presets)
    preset = next((each for each in known.values() if name in (each.name, *each.aliases)), None)
    items = []
    for key, parameter in {} if preset is None else preset.params.items():
        values = parameter.enum or (("true", "false") if parameter.type == "boolean" else ("",))
        items += [CompletionItem(f"{key}={value}", help=parameter.description) for value in values]
    if preset is None:
        items = [CompletionItem(word) for word in recent_presets(config.state_dir).get(str(name), ())]
    return [item for item in items if item.value.startswith(incomplete)]


def complete_handle(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Requests that this machine knows of, the newest first."""
    from bridge import state_dir
    from bridge.client.recent import recent

    found = reversed(recent(state_dir()).items())
    return [CompletionItem(nonce, help=preset) for nonce, preset in found if nonce.startswith(incomplete)]
