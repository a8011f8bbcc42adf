"""What may be said to the program instead of the model: lines that begin with a slash."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.chat.transcript import Transcript
from engine.cli.chat_loop import Talk
from engine.errors import ConfigurationError, GenerationError, InputError


@dataclass(frozen=True)
class Command:
    """One of them.

    Attributes:
        argument: what stands behind the name, for people.
        help: one line.
        run: does it, given that text.
    """

    argument: str
    help: str
    run: Callable[[Talk, str], None]


def obey(talk: Talk, text: str) -> None:
    """Do what a line with a slash before it asks for; where that cannot be done, say why."""
    name, _, argument = text.removeprefix("/").partition(" ")
    command = COMMANDS.get(name.strip())
    try:
        if command is None:
            raise ConfigurationError(
                f"there is no command {ascii(text.split(maxsplit=1)[0])[:100]}; /help lists them, and // "
                "begins a line with a slash"
            )
        if not command.argument and argument.strip():
            raise ConfigurationError(f"/{name} takes nothing behind it, not {ascii(argument.strip())[:100]}")
        command.run(talk, argument.strip())
    except (InputError, GenerationError) as error:
        talk.screen.say(str(error))


def _help(talk: Talk, _: str) -> None:
    rows = [(f"/{name} {command.argument}".rstrip(), command.help) for name, command in COMMANDS.items()]
    width = max(len(left) for left, _ in rows)
    lines = [f"{left:{width}}  {right}" for left, right in rows]
    lines.append("A line that ends in a backslash goes on in the next; // begins a line with a slash.")
    lines.append("Ctrl-C ends an answer and keeps what was said; Ctrl-D ends the conversation.")
    talk.screen.say("\n".join(lines))


def _reset(talk: Talk, _: str) -> None:
    conversation = talk.conversation
    conversation.transcript = Transcript(conversation.transcript.system)
    talk.screen.note("forgotten" + (", but for the system turn" if conversation.transcript.system else ""))


def _system(talk: Talk, text: str) -> None:
    talk.conversation.instruct(text or None)
    talk.screen.note("the system turn is set" if text else "there is no system turn")


def _retry(talk: Talk, _: str) -> None:
    talk.answer(talk.conversation.retry)


def _undo(talk: Talk, _: str) -> None:
    conversation = talk.conversation
    conversation.transcript = conversation.transcript.undone()
    talk.screen.note(f"the last turn is taken back; {len(conversation.transcript.turns)} messages are left")


def _save(talk: Talk, name: str) -> None:
    file, transcript = _file(name, "/save"), talk.conversation.transcript
    transcript.save(file)
    talk.screen.note(f"{len(transcript.messages)} messages written to {file}")


def _load(talk: Talk, name: str) -> None:
    file, conversation = _file(name, "/load"), talk.conversation
    conversation.transcript = Transcript.load(file)
    talk.screen.note(f"{len(conversation.transcript.messages)} messages read from {file}")


def _file(name: str, command: str) -> Path:
    if not name:
        raise ConfigurationError(f"{command} needs the name of a file")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(f"{command} {ascii(name)[:100]}: {error}") from None


def _stats(talk: Talk, _: str) -> None:
    talk.screen.say(talk.figures())


def _model(talk: Talk, model_id: str) -> None:
    conversation = talk.conversation
    if not model_id:
        talk.screen.say("\n".join(conversation.registry.ids()))
        return
    talk.screen.passing(f"loading {model_id} …")
    conversation.use(model_id)
    talk.screen.note(f"{conversation.model_id} answers from now on")


def _quit(talk: Talk, _: str) -> None:
    talk.ended = True


COMMANDS: dict[str, Command] = {
    "help": Command("", "list these commands", _help),
    "retry": Command("", "have the last turn answered again", _retry),
    "undo": Command("", "take back the last turn and its answer", _undo),
    "reset": Command("", "forget the conversation, but not the system turn", _reset),
    "system": Command("TEXT", "put a system turn before the conversation; none without TEXT", _system),
    "model": Command("ID", "let NAME or NAME@CHANNEL answer from now on; list them without ID", _model),
    "save": Command("FILE", "write the messages to a new file, one JSON object a line", _save),
    "load": Command("FILE", "go on from the messages of a file", _load),
    "stats": Command("", "say what the turns so far come to", _stats),
    "quit": Command("", "end", _quit),
}
