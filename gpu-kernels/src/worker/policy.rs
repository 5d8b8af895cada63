//! When the worker is started, how long it lingers, when a launch of it is relieved, and when it counts
//! as lost.
//!
//! Pure policy: what was seen is passed in, and so is the time, which counts from the moment at which
//! the worker was made. docs/worker.md has the reasons.

use std::time::Duration;

/// How often the keeper checks that the kernel still lives.
pub(super) const LOOK: Duration = Duration::from_millis(250);
/// How long one launch of the kernel serves a program that keeps leasing. A thread that waits for
/// all work that the device had at some moment waits for the launch of that moment, so the launch
/// must end.
pub(super) const AGE: Duration = Duration::from_millis(100);
/// How long a call whose failure may pass is repeated.
pub(super) const PATIENCE: Duration = Duration::from_secs(3);
/// Pause between the first two attempts; it doubles each time, up to `LONGEST`.
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(100);

// ---------------------------------------------------------------------- phases

/// What the last generation says about itself in the state word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It has said nothing yet: the word is still that of an older generation.
    Coming,
    /// It serves.
    Running,
    /// It leaves unless its last look finds something new.
    Leaving,
    /// It has left.
    Left,
}

impl Phase {
    /// The numbers of kernels/worker.cu.
    pub(super) const RUNNING: u64 = 1;
    pub(super) const LEAVING: u64 = 2;
    pub(super) const LEFT: u64 = 3;

    /// Reads the state word, where `launched` is the number of the last generation.
    pub(super) fn of(state: u64, launched: u64) -> Self {
        match state & 0xff {
            Self::RUNNING if state >> 8 == launched => Self::Running,
            Self::LEAVING if state >> 8 == launched => Self::Leaving,
            Self::LEFT if state >> 8 == launched => Self::Left,
            _ => Self::Coming,
        }
    }

    /// Whether the generation has left. False while a generation is about to start.
    pub(super) fn is_gone(self) -> bool {
        self == Self::Left
    }

    /// Whether the generation has left, or has said that it leaves unless it sees something new at
    /// once.
    pub(super) fn may_be_gone(self) -> bool {
        matches!(self, Self::Leaving | Self::Left)
    }
}

// ------------------------------------------------------------ starts and relief

/// What decides about a start. Seen with the launcher's lock held, so no other thread starts the
/// worker meanwhile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// The phase of the last generation.
    pub(super) phase: Phase,
    /// Whether the worker is being dropped.
    pub(super) stopping: bool,
}

impl Seen {
    /// Whether a command or a lease needs another generation.
    pub(super) fn needs_start(self) -> bool {
        !self.stopping && self.phase.may_be_gone()
    }

    /// Whether another generation may relieve the present one, whose launch has been made
    /// (`made`) and is old ([`is_old`]).
    pub(super) fn may_relieve(self, made: bool, old: bool) -> bool {
        !self.stopping && !self.phase.may_be_gone() && made && old
    }
}

/// Whether a launch that was made at `launched_at` has served so long that another should take over.
/// Asked when an operation begins. `operation` is when the operation before was launched, if there was
/// one: that saves reading the clock.
pub(super) fn is_old(operation: Option<Duration>, launched_at: Duration) -> bool {
    operation.is_some_and(|operation| operation.saturating_sub(launched_at) > AGE)
}

/// How long a worker that an operation starts lingers behind the last operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lingers {
    /// Among operations that follow one another.
    pub(super) in_a_row: Duration,
    /// For an operation that comes alone.
    pub(super) alone: Duration,
}

impl Lingers {
    /// The linger of a worker that starts at `now`. `operation` is when the operation before was
    /// launched, if there was one.
    ///
    /// Recent launches predict more, so the worker lingers longer. After an operation that comes alone
    /// the program may wait for the whole device, and so for the worker.
    pub(super) fn at(self, now: Duration, operation: Option<Duration>) -> Duration {
        match operation {
            Some(operation) if now.saturating_sub(operation) < 3 * self.in_a_row => self.in_a_row,
            _ => self.alone,
        }
    }
}

// -------------------------------------------------------------------- failures

/// Failures of a call, over `PATIENCE` and more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failures {
    /// How often the call failed.
    pub(super) times: u32,
    /// The time from the first failure to the last.
    pub(super) over: Duration,
}

/// Counts the failures of a call that may recover.
#[derive(Debug, Default)]
pub(super) struct Retries {
    since: Option<Duration>,
    times: u32,
}

impl Retries {
    /// Resets the count: the call succeeded, or nothing asks for it any more.
    pub(super) fn over(&mut self) {
        *self = Self::default();
    }

    /// Counts a failure at `now`. Returns the failures once they have lasted for `PATIENCE`.
    pub(super) fn again(&mut self, now: Duration) -> Option<Failures> {
        self.times += 1;
        let over = now.saturating_sub(*self.since.get_or_insert(now));
        (over >= PATIENCE).then_some(Failures { times: self.times, over })
    }

    /// The pause before the next attempt; `None` if nothing has failed.
    pub(super) fn pause(&self) -> Option<Duration> {
        self.times.checked_sub(1).map(|n| (SHORTEST * (1 << n.min(10))).min(LONGEST))
    }
}

// ------------------------------------------------------------------ the keeper

/// How the keeper waits before its next round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Until a thread wants the worker, at most this long.
    Woken(Duration),
    /// This long, whatever comes: threads that post meanwhile want the same start that is being
    /// retried.
    Sleep(Duration),
}

/// How an attempt to start the worker went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    /// The worker was started, or another thread had done so.
    Done,
    /// It failed, and so will every other. The worker is marked lost already.
    Final,
    /// It failed in a way that may pass.
    Failed,
}

/// What follows from an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Nothing.
    GoOn,
    /// Another attempt, after [`Keeping::wait`].
    TryAgain,
    /// The worker is lost.
    GiveUp(Failures),
}

/// The driver's answer to the question whether a launch of the worker runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// One runs.
    Runs,
    /// None runs.
    Ended {
        /// The state word, read after the answer.
        state: u64,
        /// The last generation whose launch had been made before the question.
        started: u64,
    },
    /// An error after which no call succeeds any more.
    Final,
    /// An error that may pass.
    Failed,
}

/// What an answer means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// There is no sign of death.
    Fine,
    /// The kernel ended without announcing it.
    Silent,
    /// The kernel has died with its context.
    Dead,
    /// The driver has not given an answer for too long.
    Unknown(Failures),
}

/// What the keeper remembers from round to round.
#[derive(Debug, Default)]
pub(super) struct Keeping {
    starting: Retries,
    asking: Retries,
}

impl Keeping {
    /// How to wait before the next round.
    pub(super) fn wait(&self) -> Wait {
        self.starting.pause().map_or(Wait::Woken(LOOK), Wait::Sleep)
    }

    /// Whether to start the worker on demand in this round. `asked`: a thread wants it, a graph's
    /// launch wants to be relieved, or commands wait. A needless start does no harm: such a worker finds
    /// nothing and leaves again.
    pub(super) fn needs_start(&mut self, asked: bool, phase: Phase) -> bool {
        let needs = asked && phase.may_be_gone();
        if !needs {
            self.starting.over();
        }
        needs
    }

    /// What follows from an attempt, which ended at `now`.
    pub(super) fn attempted(&mut self, now: Duration, attempt: Attempt) -> Next {
        match attempt {
            Attempt::Done => {
                self.starting.over();
                Next::GoOn
            }
            Attempt::Final => Next::GoOn,
            Attempt::Failed => self.starting.again(now).map_or(Next::TryAgain, Next::GiveUp),
        }
    }

    /// Whether to ask the driver in this round if the worker lives. `can_tell`: the driver has the
    /// call. Nothing is asked while a launch is being made (`launching`), because that launch is not
    /// on the device yet.
    pub(super) fn needs_look(&mut self, launching: bool, phase: Phase, lost: bool, can_tell: bool) -> bool {
        let needs = can_tell && !launching && !lost && !phase.is_gone();
        if !needs {
            self.asking.over();
        }
        needs
    }

    /// What the driver's answer, which came at `now`, means.
    pub(super) fn looked(&mut self, now: Duration, answer: Answer) -> Verdict {
        match answer {
            Answer::Runs => {
                self.asking.over();
                Verdict::Fine
            }
            Answer::Ended { state, started } => {
                self.asking.over();
                // A larger number: a generation that was launched after the question.
                let newer = state >> 8 > started;
                let announced = state == started << 8 | Phase::LEFT;
                if newer || announced { Verdict::Fine } else { Verdict::Silent }
            }
            Answer::Final => Verdict::Dead,
            Answer::Failed => self.asking.again(now).map_or(Verdict::Fine, Verdict::Unknown),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const PHASES: [Phase; 4] = [Phase::Coming, Phase::Running, Phase::Leaving, Phase::Left];

    #[test]
    fn only_the_last_generations_word_tells_its_phase() {
        for (number, phase) in
            [(Phase::RUNNING, Phase::Running), (Phase::LEAVING, Phase::Leaving), (Phase::LEFT, Phase::Left)]
        {
            assert_eq!(Phase::of(7 << 8 | number, 7), phase);
            assert_eq!(Phase::of(6 << 8 | number, 7), Phase::Coming, "an older generation's word");
            assert_eq!(Phase::of(8 << 8 | number, 7), Phase::Coming, "a newer generation's word");
        }
        assert_eq!(Phase::of(7 << 8, 7), Phase::Coming);
        assert_eq!(Phase::of(Phase::LEFT, 0), Phase::Left, "before the first launch");
    }

    #[test]
    fn a_worker_that_leaves_may_be_gone_and_only_one_that_has_left_is_gone() {
        assert_eq!(PHASES.map(Phase::is_gone), [false, false, false, true]);
        assert_eq!(PHASES.map(Phase::may_be_gone), [false, false, true, true]);
    }

    #[test]
    fn a_start_is_needed_unless_a_generation_serves_or_comes() {
        let needs = |stopping| PHASES.map(|phase| Seen { phase, stopping }.needs_start());
        assert_eq!(needs(false), [false, false, true, true]);
        assert_eq!(needs(true), [false; 4], "nothing is started while the worker is dropped");
    }

    #[test]
    fn a_launch_is_relieved_if_it_is_made_and_old_and_stays() {
        let relieves =
            |stopping, made, old| PHASES.map(|phase| Seen { phase, stopping }.may_relieve(made, old));
        assert_eq!(relieves(false, true, true), [true, true, false, false]);
        assert_eq!(relieves(false, true, false), [false; 4]);
        assert_eq!(relieves(false, false, true), [false; 4]);
        assert_eq!(relieves(true, true, true), [false; 4]);
    }

    #[test]
    fn a_launch_is_old_when_operations_go_on_for_longer_than_its_age() {
        assert!(!is_old(None, Duration::ZERO), "there was no operation");
        assert!(!is_old(Some(AGE), Duration::ZERO));
        assert!(is_old(Some(AGE + MS), Duration::ZERO));
        assert!(!is_old(Some(AGE + MS), MS));
        assert!(!is_old(Some(MS), AGE + 2 * MS), "the operation came before the launch");
    }

    #[test]
    fn the_worker_lingers_longer_among_operations_in_a_row() {
        let lingers = Lingers { in_a_row: 20 * MS, alone: 5 * MS };
        assert_eq!(lingers.at(1000 * MS, None), 5 * MS, "the first operation is alone");
        assert_eq!(lingers.at(1000 * MS, Some(1000 * MS)), 20 * MS);
        assert_eq!(lingers.at(1059 * MS, Some(1000 * MS)), 20 * MS);
        assert_eq!(lingers.at(1060 * MS, Some(1000 * MS)), 5 * MS, "three times as long ago");
        assert_eq!(lingers.at(999 * MS, Some(1000 * MS)), 20 * MS, "clocks of two threads");
        let never = Lingers { in_a_row: Duration::ZERO, alone: MS };
        assert_eq!(never.at(MS, Some(MS)), MS);
    }

    #[test]
    fn pauses_double_up_to_a_tenth_of_a_second() {
        let mut retries = Retries::default();
        assert_eq!(retries.pause(), None);
        let pauses: Vec<_> = (0..40)
            .map(|_| {
                assert_eq!(retries.again(Duration::ZERO), None);
                retries.pause().unwrap().as_millis()
            })
            .collect();
        assert_eq!(pauses[..9], [1, 2, 4, 8, 16, 32, 64, 100, 100]);
        assert!(pauses[9..].iter().all(|pause| *pause == 100));
        retries.over();
        assert_eq!(retries.pause(), None);
    }

    #[test]
    fn p7_failures_end_the_retries_after_the_patience_counted_from_the_first() {
        let mut retries = Retries::default();
        let first = Duration::from_secs(100);
        assert_eq!(retries.again(first), None);
        assert_eq!(retries.again(first + PATIENCE - MS), None);
        assert_eq!(retries.again(first + PATIENCE), Some(Failures { times: 3, over: PATIENCE }));
        retries.over();
        assert_eq!(retries.again(first + 10 * PATIENCE), None, "a success between them starts anew");
    }

    #[test]
    fn the_keeper_starts_a_worker_that_is_asked_for_and_may_be_gone() {
        let mut keeping = Keeping::default();
        assert_eq!(PHASES.map(|phase| keeping.needs_start(true, phase)), [false, false, true, true]);
        assert_eq!(PHASES.map(|phase| keeping.needs_start(false, phase)), [false; 4]);
        assert_eq!(keeping.wait(), Wait::Woken(LOOK));
    }

    #[test]
    fn p7_a_start_that_keeps_failing_is_retried_and_then_given_up() {
        let mut keeping = Keeping::default();
        let (mut now, mut tries) = (Duration::from_secs(5), 0);
        let failures = loop {
            assert!(keeping.needs_start(true, Phase::Left));
            tries += 1;
            match keeping.attempted(now, Attempt::Failed) {
                Next::TryAgain => {}
                Next::GiveUp(failures) => break failures,
                Next::GoOn => panic!("a failure without a consequence"),
            }
            let Wait::Sleep(pause) = keeping.wait() else { panic!("it does not pause") };
            now += pause;
        };
        assert_eq!(failures.times, tries);
        assert!(failures.over >= PATIENCE && failures.over <= PATIENCE + LONGEST, "{failures:?}");
    }

    #[test]
    fn a_start_that_succeeds_or_is_not_asked_for_any_more_ends_the_pauses() {
        for ends in [
            |keeping: &mut Keeping| assert_eq!(keeping.attempted(MS, Attempt::Done), Next::GoOn),
            |keeping: &mut Keeping| assert!(!keeping.needs_start(false, Phase::Left)),
            |keeping: &mut Keeping| assert!(!keeping.needs_start(true, Phase::Running)),
        ] {
            let mut keeping = Keeping::default();
            assert_eq!(keeping.attempted(MS, Attempt::Failed), Next::TryAgain);
            assert_eq!(keeping.wait(), Wait::Sleep(SHORTEST));
            ends(&mut keeping);
            assert_eq!(keeping.wait(), Wait::Woken(LOOK));
        }
    }

    #[test]
    fn an_error_that_is_final_is_not_retried() {
        let mut keeping = Keeping::default();
        assert_eq!(keeping.attempted(MS, Attempt::Final), Next::GoOn);
        assert_eq!(keeping.wait(), Wait::Woken(LOOK));
    }

    #[test]
    fn the_driver_is_asked_only_about_a_worker_that_should_be_there() {
        let mut keeping = Keeping::default();
        assert_eq!(
            PHASES.map(|phase| keeping.needs_look(false, phase, false, true)),
            [true, true, true, false]
        );
        assert!(!keeping.needs_look(true, Phase::Running, false, true), "a launch is being made");
        assert!(!keeping.needs_look(false, Phase::Running, true, true), "it is lost");
        assert!(!keeping.needs_look(false, Phase::Running, false, false), "the driver lacks the call");
    }

    #[test]
    fn p7_a_worker_that_ended_without_announcing_it_is_dead() {
        let mut keeping = Keeping::default();
        let mut ended = |state| keeping.looked(MS, Answer::Ended { state, started: 7 });
        assert_eq!(ended(7 << 8 | Phase::RUNNING), Verdict::Silent);
        assert_eq!(ended(7 << 8 | Phase::LEAVING), Verdict::Silent);
        assert_eq!(ended(6 << 8 | Phase::LEFT), Verdict::Silent, "it ended before its first word");
        assert_eq!(ended(7 << 8 | Phase::LEFT), Verdict::Fine, "it left in the meantime");
        assert_eq!(ended(8 << 8 | Phase::RUNNING), Verdict::Fine, "another was launched in the meantime");
        assert_eq!(keeping.looked(MS, Answer::Runs), Verdict::Fine);
        assert_eq!(keeping.looked(MS, Answer::Final), Verdict::Dead);
    }

    #[test]
    fn p7_a_driver_that_never_answers_ends_the_worker() {
        let mut keeping = Keeping::default();
        assert_eq!(keeping.looked(MS, Answer::Failed), Verdict::Fine);
        assert_eq!(keeping.looked(MS + PATIENCE / 2, Answer::Failed), Verdict::Fine);
        let unknown = Verdict::Unknown(Failures { times: 3, over: PATIENCE });
        assert_eq!(keeping.looked(MS + PATIENCE, Answer::Failed), unknown);
        // One answer starts the count anew, and so does a round without a question.
        assert_eq!(keeping.looked(2 * PATIENCE, Answer::Runs), Verdict::Fine);
        assert_eq!(keeping.looked(3 * PATIENCE, Answer::Failed), Verdict::Fine);
        assert!(!keeping.needs_look(false, Phase::Left, false, true));
        assert_eq!(keeping.looked(9 * PATIENCE, Answer::Failed), Verdict::Fine);
    }
}
