"""One conversation at the edge: turns asked and shown, Ctrl-C, and the figures of all of them."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.chat.conversation import Conversation, DoesNotFit
from engine.chat.turn import Turn
from engine.cli.screen import Screen
from engine.errors import GenerationError, InputError
from engine.server.parsing import ParsedText
from engine.server.sequence import PrefillProgress


class Talk:
    """A conversation and the screen it is shown on."""

    def __init__(self, conversation: Conversation, screen: Screen) -> None:
        self.conversation, self.screen = conversation, screen
        self.turns: list[Turn] = []
        self.ended = False

    def answer(self, ask: Callable[[], Iterator[PrefillProgress | ParsedText | Turn]]) -> None:
        """Have the model speak, and show it; Ctrl-C ends the answer and keeps what was said."""
        self.screen.begin()
        try:
            with _interrupts_call(self.conversation.stop):
                for event in ask():
                    self._show(event)
        except DoesNotFit as error:
            self.screen.refuse(
                f"{error}; nothing was sent: /undo takes back the last turn, /reset begins anew"
            )
        except (InputError, GenerationError) as error:
            self.screen.refuse(str(error))

    def _show(self, event: PrefillProgress | ParsedText | Turn) -> None:
        match event:
            case ParsedText():
                self.screen.piece(event)
            case Turn():
                self.turns.append(event)
                self.screen.turn(event)
                if not event.said:
                    self.screen.note("nothing was said, so the turn is not kept")
            case _:
                self.screen.progress(event)

    def figures(self) -> str:
        """What the turns so far come to, a line each."""
        turns = self.turns
        decoded = [turn for turn in turns if turn.tokens_per_s is not None]
        seconds = sum(turn.seconds for turn in decoded)
        rounds, accepted = sum(turn.verify_rounds for turn in turns), sum(turn.accepted for turn in turns)
        read = sum(turn.usage.prompt_tokens for turn in turns)
        told = [turn.provenance for turn in turns if turn.provenance is not None]
        lines = [
            f"model: {self.conversation.model_id}",
            f"answers: {len(turns)}, {sum(turn.usage.completion_tokens for turn in turns)} tokens",
            f"prompts: {read} tokens, {sum(turn.cached_tokens for turn in turns)} of them cached",
        ]
        if seconds > 0:
            tokens = sum(turn.usage.completion_tokens - 1 for turn in decoded)
            lines.append(f"decoding: {tokens / seconds:.1f} tok/s")
        if rounds:
            lines.append(
                f"drafting: {accepted / rounds + 1:.2f} tokens emitted per verify, {rounds} verifies"
            )
        if told:
            last = told[-1]
            lines.append(
                f"drafter: {last.drafter or 'none'}" + (f" ({last.why_off})" if last.why_off else "")
            )
            lines.append(f"keys and values: {last.resident_bytes:,} bytes")
        return "\n".join(lines)


@contextmanager
def _interrupts_call(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls a function while the block lasts."""
    before = signal.signal(signal.SIGINT, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
