"""Several sequences decoded together: one verify forward for all, each with its own drafts and acceptance.

    blocks = [[bonus, d1 … d(B-1)] of every sequence]     [S, B]
    logits = target(blocks)                               one forward, [S, B, V]
    every sequence accepts, emits and keeps its own a + 1 positions

Sequences join after their first token, which their own session computes, and leave between two rounds; their
caches are copied each time. One that has fewer drafts than another gets its block filled up; the filling is
never accepted. The tokens are those each would have had alone: the likeliest, those of its seed, or drawn
from the target's distribution. Drafters of one network draft together where they can.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import mlx.core as mx

from engine.acceptance import TokenSelector, likeliest, unpack
from engine.cache.batch import BatchTransaction, extend, extract, merge, refuse_single
from engine.cache.policy import NATIVE, KVPolicy
from engine.cache.stats import KVUse, kept_positions, kv_use
from engine.cache.transaction import new_caches, resident
from engine.decode import CLEAR_EVERY, Round, SequenceDecoder, Step, check_request, default_draft_length
from engine.device import launch, read_tokens, wait_for
from engine.draft_length import DraftLength, FixedDraftLength
from engine.drafters.base import NOTHING, Drafter
from engine.errors import ConfigurationError
from engine.restoration.session import RestorationPlan
from engine.sampling import Sampler
from engine.session import Session
from engine.stops import Stops
from engine.target.attention import CodedAttention
from engine.target.model import HiddenStateHooks, Target


@dataclass(frozen=True)
class Request:
    """One sequence to be continued; the fields are those of `engine.decode.decode`."""

    prompt: Sequence[int]
    max_tokens: int
    stops: Stops = field(default_factory=Stops)
    sampler: Sampler | None = None


@dataclass(frozen=True)
class Share:
    """A sequence's part of the batch's caches, all sequences counted alike."""

    classes: dict[str, int]  # class names of the merged caches with their counts
    nbytes: int  # their bytes divided by the sequences in them
    kv: KVUse | None  # likewise what coded layers store
    kept: int | None  # see `engine.cache.stats.kept_positions`
    restored: int  # positions times layers of this sequence that were restored
    drafter_forwards: int  # of this sequence's drafter


@dataclass(frozen=True)
class Emitted:
    """A step of one sequence."""

    request: int  # its place among the requests
    step: Step  # whose round has the seconds of the whole batch's
    share: Share | None  # with the last step


def decode_batch(
    target: Target,
    drafter: Drafter | None,
    requests: Sequence[Request],
    *,
    draft_length: DraftLength | None = None,
    prefill_chunk: int = 2048,
    policy: KVPolicy = NATIVE,
    restoration: RestorationPlan | None = None,
) -> Iterator[tuple[Emitted, ...]]:
    """Continue several prompts at once; see `engine.decode.decode`.

    Each sequence gets a twin of the drafter. Each request has stops and a sampler that no other shares.

    Yields:
        The first token of each sequence when it is known, by itself; then what every sequence of a round got.
    """
    if not requests:
        raise ConfigurationError("there is nothing to decode")
    for request in requests:
        check_request(request.prompt, request.max_tokens)
    draft_length = default_draft_length(drafter, draft_length)
    refuse_single(target.model, [new_caches(target.model, 1, policy)])
    places: dict[SequenceDecoder, tuple[int, int]] = {}  # place among the requests, and what was restored
    for index, request in enumerate(requests):
        own, selector = drafter.twin() if drafter else None, TokenSelector(request.sampler, ())
        headroom = max(draft_length.largest, 1)
        session = Session(target, own, headroom=headroom, policy=policy, restoration=restoration)
        row = SequenceDecoder(session, draft_length, request.stops, selector, request.max_tokens)
        with session:
            step = row.prefill(request.prompt, prefill_chunk)
            restored = session.restored
        share = None
        if step.finish is None:
            places[row] = index, restored
        else:
            share = _share(merge(target.model, [session.caches]), 1, row, restored)
        yield (Emitted(index, step, share),)
    del session
    if not places:
        return
    with closing(BatchDecoder(target, lambda _: draft_length)) as batch:
        batch.join(list(places))
        while batch.rows:
            steps, count = batch.step(), len(batch.rows)
            emitted = []
            for row, found in steps:
                if isinstance(found, Exception):
                    raise found
                index, restored = places[row]
                share = _share(batch.caches, count, row, restored) if found.finish else None
                emitted.append(Emitted(index, found, share))
            batch.leave([row for row, _ in steps if row.finish], keep=False)
            yield tuple(emitted)


def _share(caches: list[Any], sequences: int, own: SequenceDecoder, restored: int) -> Share:
    (classes, nbytes), use, drafter = resident(caches), kv_use(caches), own.session.drafter
    kv = None if use is None else KVUse(use.layers, use.values // sequences, use.nbytes // sequences)
    forwards = drafter.forwards if drafter is not None else 0
    return Share(classes, nbytes // sequences, kv, kept_positions(caches), restored, forwards)


Steps = list[tuple[SequenceDecoder, Step | Exception]]
DraftLengths = Callable[[Sequence[SequenceDecoder]], DraftLength]  # of a batch of these sequences


@dataclass(frozen=True)
class _Launched:
    """A plain forward that is on its way."""

    tokens: mx.array  # of each sequence, int32 [S]
    packed: list[mx.array] | None  # the same with records, int32 [1 + …] each; None: there are none
    states: mx.array | None  # [S, 1, K·hidden]
    errors: dict[int, Exception] = field(default_factory=dict)  # of sequences' processors, by row

    def of(self, left: list[int]) -> "_Launched":
        """Those of some sequences."""
        chosen = mx.array(left)
        states = self.states if self.states is None else self.states[chosen]
        errors = {row: self.errors[index] for row, index in enumerate(left) if index in self.errors}
        packed = self.packed and [self.packed[index] for index in left]
        return _Launched(self.tokens[chosen], packed, states, errors)

    def read(self) -> list[list[int]]:
        """Wait for the numbers of each sequence, its token first."""
        if self.packed is None:
            return [[token] for token in read_tokens(self.tokens)]
        return _read(self.packed)


class BatchDecoder:
    """The rounds of sequences of one target whose caches have one layout, see `engine.cache.batch.layout_of`.

    A sequence with a `FixedDraftLength` keeps to it. For the others, ``draft_lengths`` gives what chooses: a
    block costs a batch something else than one sequence.
    """

    def __init__(self, target: Target, draft_lengths: DraftLengths) -> None:
        self.target, self.rows = target, list[SequenceDecoder]()
        self._draft_lengths, self._opened = draft_lengths, ExitStack()
        self._transaction: BatchTransaction | None = None
        self._hooks: HiddenStateHooks | None = None
        self._draft_length = DraftLength(1)
        self._planned = False  # every row has the drafts of the next round
        self._launch_s = 0.0
        self._ahead: _Launched | None = None
        self._settled = False  # the positions of `_ahead` are committed
        self._silent = False  # the drafters were asked and none had anything to propose
        self._has_lookup = False  # a look-up paid after the last plain step, so one may after the next
        self._timed = True  # whether the device has done nothing else since the last round
        self._rounds = 0

    def close(self) -> None:
        """Restore the target's layers."""
        self._opened.close()

    @property
    def caches(self) -> list[Any]:
        """The merged caches of all layers."""
        return self._transaction.caches if self._transaction is not None else []

    @property
    def is_ahead(self) -> bool:
        """Whether a plain step is on its way, which the next `step` finishes."""
        return self._ahead is not None

    # --- who takes part ----------------------------------------------------------------------------------

    def join(self, rows: Sequence[SequenceDecoder]) -> None:
        """Take over sequences that have their first token. No plain step may be on its way, see `step`."""
        if self._ahead is not None:
            raise ValueError("a sequence joins where no plain step is on its way")
        merged = merge(self.target.model, [row.session.lend() for row in rows])
        for row in rows:
            row.draft = NOTHING
        if self._transaction is None:
            self._planned = False
            self._open(merged, rows[0].session.policy)
        else:
            extend(self.caches, merged)
        layers = {
            d.target_layers for row in rows if (d := row.session.drafter) is not None and d.target_layers
        }
        if layers and self._hooks is None:
            self._hooks = self.target.hook_layers(next(iter(layers)))
            self._opened.callback(self._hooks.close)
        self.rows += rows
        self._resize()

    def leave(self, rows: Sequence[SequenceDecoder], *, keep: bool = True) -> None:
        """Let sequences go, whatever they have done; with ``keep``, each with its caches in its session."""
        if not rows:
            return
        if self._ahead is not None and not self._settled:
            self._settle(self._ahead)
        caches = self.caches
        for row in rows:
            if keep:
                row.session.adopt(extract(caches, self.rows.index(row)))
            row.draft = NOTHING
        left = [index for index, row in enumerate(self.rows) if row not in rows]
        self.rows = [self.rows[index] for index in left]
        if not left:
            self.close()
            self._transaction = self._hooks = self._ahead = None
            return
        if self._transaction is not None:
            self._transaction.filter(left)
        if self._ahead is not None:
            self._ahead = self._ahead.of(left)
        self._resize()

    def _open(self, caches: list[Any], policy: KVPolicy) -> None:
        with ExitStack() as opened:  # what fails half way leaves the model as it was
            self._transaction = BatchTransaction(self.target.model, caches)
            opened.callback(self._transaction.close)
            if policy.attended:
                opened.callback(CodedAttention(self.target.model).close)
            self._opened = opened.pop_all()

    def _resize(self) -> None:
        chosen = self._draft_lengths(self.rows)
        if chosen is not self._draft_length:
            self._draft_length = chosen
            chosen.start()

    # --- rounds ------------------------------------------------------------------------------------------

    def step(self, *, ahead: bool = True, timed: bool = True) -> Steps:
        """One round, for all; an error of one sequence's grammar or processors is its own.

        Those that ended are to leave before the next. With ``ahead`` the next round is started. Without
        ``timed``, the device did something else since the last one, so that its seconds tell no costs.
        """
        self._timed = self._draft_length.exploring = timed
        transaction = self._transaction
        if transaction is None:
            raise ValueError("nothing takes part in the batch")
        with transaction.guarded():
            if self._ahead is None and not self._planned:
                self._plan()
            self._planned = False
            if any(len(row.draft) for row in self.rows):
                steps = self._verify(transaction)
            else:
                steps = self._plain(transaction, ahead=ahead)
            if ahead and self._ahead is None and any(row.finish is None for row in self.rows):
                self._plan()
        self._rounds += 1
        if self._rounds % CLEAR_EVERY == 0:
            mx.clear_cache()
        return steps

    def _plan(self) -> None:
        """Ask for the drafts of the next round."""
        self._planned, self._silent, self._has_lookup = True, False, False
        started = perf_counter()
        going = [row for row in self.rows if row.finish is None]
        adaptive = [row for row in going if not _keeps_block(row)]
        asks = [ask for row in adaptive for ask in row.asks(row.bonus)]
        most = min((row.session.headroom for row in self.rows), default=1)
        for row in self.rows:
            row.draft = NOTHING
        if asks:
            chosen = self._draft_length.drafts(asks, min(self._draft_length.largest, most))
            asked = (row for row in adaptive if row.session.drafter is not None)
            for row, draft in zip(asked, chosen, strict=True):
                row.draft = draft
            self._silent = self._draft_length.asked > 1 and not any(map(len, chosen))
        for row in going:
            if _keeps_block(row) and (own := row.asks(row.bonus)):
                (row.draft,) = row.draft_length.drafts(own, most)
        if drafts := [row.draft.tokens for row in self.rows if len(row.draft)]:
            launch(drafts)
        self._launch_s = perf_counter() - started

    def _verify(self, transaction: BatchTransaction) -> Steps:
        """One round: verify the drafts that `_plan` has launched, and let each sequence keep its own."""
        started, rows = perf_counter(), self.rows
        drafts = [row.draft for row in rows]
        longest = max(map(len, drafts))
        filled = mx.stack([mx.pad(draft.tokens, (0, longest - len(draft))) for draft in drafts])
        logits, states = self._forward(transaction, mx.concatenate([self._bonuses(), filled], axis=1))
        packed, errors = self._accepted(filled, logits, states)
        draft_s = self._launch_s
        if self._draft_length.times_drafts:
            waiting = perf_counter()
            for draft in drafts:
                wait_for(draft.tokens)
            draft_s += perf_counter() - waiting
        values = _read(packed)
        seconds = self._launch_s + perf_counter() - started
        kept, steps = [], list[tuple[SequenceDecoder, Step | Exception]]()
        learned = dict[bool, list[int]]()  # accepted drafts of those with all of them, looked up or not
        for index, (row, draft, numbers) in enumerate(zip(rows, drafts, values, strict=True)):
            row.draft = NOTHING
            if (error := errors.get(index)) is not None:
                kept.append(0)
                row.finish = "error"
                steps.append((row, error))
                continue
            verdict, looked_up = unpack(numbers, row.stops), draft.chances is not None
            kept.append(verdict.kept)
            own = states if states is None else states[index : index + 1, : verdict.kept]
            row.session.note((row.bonus, *verdict.tokens[:-1]), own)
            record = Round(1 + len(draft), verdict.accepted, draft_s, seconds - draft_s, looked_up)
            if len(draft) == longest and not _keeps_block(row):
                learned.setdefault(looked_up, []).append(verdict.accepted)
            rest = numbers[2 + len(draft) :]
            steps.append(
                (row, row.emit(verdict.tokens, record, verdict.stopped, rest, plan=False, learn=False))
            )
        transaction.commit(kept)
        if learned:
            looked_up = True in learned
            accepted = learned[looked_up]
            if not self._timed:
                seconds = draft_s = 0.0
            self._draft_length.record(1 + longest, accepted, seconds, draft_s, looked_up=looked_up)
        return steps

    def _accepted(
        self, filled: mx.array, logits: mx.array, states: mx.array | None
    ) -> tuple[list[mx.array], dict[int, Exception]]:
        """Each row's acceptance, see `TokenSelector.of_block`, launched, and errors of rows.

        The rows without samplers, processors and records are accepted all at once.
        """
        rows, errors = self.rows, dict[int, Exception]()
        before = [row.selector.before(row.draft.tokens) for row in rows]
        if any(before):
            launch([each for each in before if each])  # what processors may read, then the forward
            launch(logits, states)
        tokens = likeliest(logits)  # [S, B]
        lengths = mx.array([[len(row.draft)] for row in rows])
        hits = (filled == tokens[:, :-1]) & (mx.arange(filled.shape[1])[None] < lengths)
        counts = mx.cumprod(hits.astype(mx.int32), axis=1).sum(axis=1, keepdims=True)
        together = mx.concatenate([counts, tokens], axis=1)  # [S, 1 + B]
        packed = []
        for index, row in enumerate(rows):
            size = 1 + len(row.draft)
            if row.selector.is_plain:
                packed.append(together[index, : 1 + size])
                continue
            try:
                packed.append(row.selector.of_block(row.draft, logits[index, :size], before[index]))
            except Exception as error:  # of its processors; the others go on
                errors[index] = error
                packed.append(together[index, : 1 + size])
        launch(packed, states)  # a second graph: one giant graph chokes some devices
        return packed, errors

    def _plain(self, transaction: BatchTransaction, *, ahead: bool) -> Steps:
        """A plain step; with ``ahead`` the next, if it is plain too, is launched before tokens are read."""
        started, launched = perf_counter(), self._ahead
        timed = self._timed and launched is not None  # else two launches are in its seconds
        if launched is None:
            launched = self._launch(transaction, self._bonuses())
            self._settled = False
        if not self._settled:
            self._settle(launched)
        self._ahead, rows = None, self.rows
        most = max(row.remaining for row in rows) - 1
        plain = self._silent or self._draft_length.choose(most) == 1
        fixed = any(_keeps_block(row) and row.draft_length.largest > 1 for row in rows)
        processed = any(row.selector.processors for row in rows)  # these wait for each token
        pipelined = ahead and most > 0 and plain and not (self._has_lookup or fixed or processed)
        if pipelined:
            self._ahead = self._launch(transaction, launched.tokens[:, None], 1)
            self._settled = False
        values = launched.read()
        record = Round(1, 0, 0.0, perf_counter() - started)
        steps = list[tuple[SequenceDecoder, Step | Exception]]()
        for index, (row, (token, *numbers)) in enumerate(zip(rows, values, strict=True)):
            if (error := launched.errors.get(index)) is not None:
                row.finish = "error"
                steps.append((row, error))
                continue
            stopped = row.stops.find((token,)) is not None
            steps.append((row, row.emit((token,), record, stopped, numbers, plan=False, learn=False)))
        going = [row for row in rows if row.finish is None]
        if not going and self._ahead is not None:
            transaction.abort()
            self._ahead = None
        if self._ahead is not None:
            self._draft_length.record(1, 0, record.verify_s if timed else 0.0)
            asks = [ask for row in going for ask in row.asks(row.bonus)]
            if self._silent and asks:
                drafts = self._draft_length.drafts(asks, self._draft_length.largest)
                self._silent = self._draft_length.asked > 1 and not any(map(len, drafts))
            self._has_lookup = bool(asks) and self._draft_length.has_lookup(asks)
        return steps

    def _settle(self, launched: _Launched) -> None:
        """Commit the positions of a plain step, whose tokens may not be known yet."""
        if self._transaction is not None:
            self._transaction.commit([1] * len(self.rows))
        for index, row in enumerate(self.rows):
            states = launched.states
            row.session.note((row.bonus,), states if states is None else states[index : index + 1])
        self._settled = True

    def _bonuses(self) -> mx.array:
        """The last token of each sequence, [S, 1]."""
        return mx.array([[row.bonus] for row in self.rows], mx.int32)

    def _launch(self, transaction: BatchTransaction, tokens: mx.array, ahead: int = 0) -> _Launched:
        """Start a plain forward over [S, 1], ``ahead`` of tokens that are not noted yet."""
        logits, states = self._forward(transaction, tokens)
        selectors = [row.selector for row in self.rows]
        chosen, errors = likeliest(logits[:, -1]), dict[int, Exception]()  # [S]
        if all(selector.is_plain for selector in selectors):
            launch(chosen, states)
            return _Launched(chosen, None, states)
        if any(selector.processors for selector in selectors):
            launch(logits, states)
        following, packed = [], []
        for index, selector in enumerate(selectors):
            token = record = chosen[index : index + 1]
            if not selector.is_plain:
                so_far = selector.joined(tokens[index]) if ahead else selector.so_far
                try:
                    token, record = selector.of_row(logits[index, -1:], so_far, ahead)
                except Exception as error:  # of its processors; the others go on
                    errors[index] = error
            following.append(token)
            packed.append(record)
        launch(packed, states)
        return _Launched(mx.concatenate(following), packed, states, errors)

    def _forward(self, transaction: BatchTransaction, tokens: mx.array) -> tuple[mx.array, mx.array | None]:
        """Open a transaction and run [S, N] tokens forward: logits [S, N, V], states [S, N, K·hidden]."""
        transaction.begin(tokens.shape[1])
        return self.target.forward(tokens, transaction.caches, self._hooks)


def _keeps_block(row: SequenceDecoder) -> bool:
    return isinstance(row.draft_length, FixedDraftLength)


def _read(packed: list[mx.array]) -> list[list[int]]:
    """Read arrays of integers in one transfer."""
    values = iter(read_tokens(mx.concatenate(packed)))
    return [[next(values) for _ in range(array.shape[0])] for array in packed]


class ContinuousBatch:
    """Sequences that come and go: one is decoded by itself in its session, several are in a batch."""

    def __init__(self, target: Target, draft_lengths: DraftLengths) -> None:
        """See `BatchDecoder`."""
        self._batch = BatchDecoder(target, draft_lengths)
        self._alone: SequenceDecoder | None = None
        self._rounds: Iterator[Step] = iter(())  # of the one alone
        self._joining: list[SequenceDecoder] = []

    @property
    def rows(self) -> list[SequenceDecoder]:
        """The sequences, those that join with the next round included."""
        return [*([self._alone] if self._alone else []), *self._batch.rows, *self._joining]

    @property
    def nbytes(self) -> int:
        """Bytes of the batch's merged caches; those of a sequence by itself are its session's."""
        return resident(self._batch.caches)[1]

    def add(self, row: SequenceDecoder) -> None:
        """Let a sequence that has its first token take part from the next round on."""
        self._joining.append(row)

    def remove(self, row: SequenceDecoder) -> None:
        """Let a sequence go between two rounds, with its caches in its session."""
        if row is self._alone:
            self._end_alone()
        elif row in self._joining:
            self._joining.remove(row)
        else:
            self._batch.leave([row])

    def step(self, *, timed: bool = True) -> Steps:
        """One round of all; see `BatchDecoder.step`. Those that ended are to be removed before the next."""
        batch = self._batch
        if self._joining or len(batch.rows) == 1:
            if batch.is_ahead:  # a plain step is on its way for those that are there
                return batch.step(ahead=False, timed=timed)
            self._regroup()
        row = self._alone
        if row is None:
            return batch.step(timed=timed)
        row.timed = row.draft_length.exploring = timed
        try:
            return [(row, next(self._rounds))]
        except Exception as error:
            row.finish = "error"
            return [(row, error)]

    def close(self) -> None:
        """Restore the target's layers."""
        self._end_alone()
        self._batch.close()

    def _regroup(self) -> None:
        rows = self.rows
        if len(rows) == 1:
            self._batch.leave(self._batch.rows)
            [self._alone] = rows
            self._rounds = _rounds_alone(rows[0])
        else:
            joining = [row for row in rows if row not in self._batch.rows]
            self._end_alone()
            self._batch.join(joining)
        self._joining.clear()

    def _end_alone(self) -> None:
        self._alone, rounds = None, self._rounds
        self._rounds = iter(())
        if isinstance(rounds, Generator):
            rounds.close()


def _rounds_alone(row: SequenceDecoder) -> Generator[Step]:
    """Rounds in the sequence's own session; closed, it leaves there all but the last token."""
    with row.session.guarded():
        yield from row.rounds()
