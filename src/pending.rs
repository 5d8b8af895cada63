//! Queue pairs that are being made.

use std::fmt;
use std::time::{Duration, Instant};

use crate::comm::Comm;
use crate::error::Result;
use crate::mesh::Meetings;
use crate::qp::{OwnEnd, QpConfig, QueuePair};

/// Queue pairs whose ends have not met yet, made by [`Comm::begin_queue_pairs`]: all of them come up, or none.
///
/// The ends meet while this rank calls [`PendingQueuePairs::poll`] or [`PendingQueuePairs::wait`], and only then; the peers wait for
/// it at most for the setting `timeout`. So a thread that has several ranks polls all of them by turns. Dropping it tells the
/// peers that the call has failed.
#[must_use = "queue pairs come up when they are polled or waited for"]
pub struct PendingQueuePairs<'a> {
    comm: &'a Comm,
    meetings: Meetings<'a, OwnEnd<'a>>,
}

impl Comm {
    /// Makes several queue pairs at once, one for each (peer, label) in `ends`.
    ///
    /// All offers go out before the first answer is waited for, so rings and meshes of queue pairs come
    /// up in whatever order the ranks call.
    pub fn queue_pairs(&self, ends: &[(u32, u32)], config: QpConfig) -> Result<Vec<QueuePair>> {
        self.begin_queue_pairs(ends, config)?.wait()
    }

    /// Begins to make several queue pairs at once, as [`Comm::queue_pairs`] does, without waiting for the peers: for a thread
    /// that has several ranks, or other work meanwhile.
    pub fn begin_queue_pairs(&self, ends: &[(u32, u32)], config: QpConfig) -> Result<PendingQueuePairs<'_>> {
        Ok(PendingQueuePairs { comm: self, meetings: self.meetings(ends, config)? })
    }
}

impl PendingQueuePairs<'_> {
    /// Goes on with what has come from the peers, and waits for more at most for `time`. True once all ends are ready, so that
    /// [`PendingQueuePairs::wait`] waits no more.
    ///
    /// # Errors
    /// Those of [`Comm::queue_pair`]; the queue pairs can't come up any more then.
    pub fn poll(&mut self, time: Duration) -> Result<bool> {
        self.comm.check()?;
        self.meetings.go_on(Some(Instant::now() + time))
    }

    /// Waits until all ends have met, and returns the queue pairs in the order in which they were asked for.
    ///
    /// # Errors
    /// Those of [`Comm::queue_pair`].
    pub fn wait(mut self) -> Result<Vec<QueuePair>> {
        self.meetings.go_on(None)?;
        self.comm.join_all(self.meetings.ready())
    }
}

impl fmt::Debug for PendingQueuePairs<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PendingQueuePairs(rank {} of {})", self.comm.rank(), self.comm.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Context, Error, Settings};

    fn ranks(size: u32, timeout: &str) -> Vec<Comm> {
        let mut settings = Settings::default();
        for (name, value) in [("device", "cpu"), ("timeout", timeout)] {
            settings.set(name, value).unwrap();
        }
        Comm::local(&Context::builder().settings(settings).build().unwrap(), size).unwrap()
    }

    #[test]
    fn one_thread_makes_the_queue_pairs_of_all_ranks() {
        let comms = ranks(3, "60s");
        let begin = |comm: &'_ Comm| -> Vec<(u32, u32)> {
            (0..3).filter(|peer| *peer != comm.rank()).map(|peer| (peer, 0)).collect()
        };
        let begun =
            comms.iter().map(|comm| comm.begin_queue_pairs(&begin(comm), QpConfig::default()).unwrap());
        let mut pending: Vec<_> = begun.collect();
        while !pending
            .iter_mut()
            .map(|p| p.poll(Duration::from_millis(1)).unwrap())
            .fold(true, |all, one| all & one)
        {}
        for (rank, pending) in pending.into_iter().enumerate() {
            let qps = pending.wait().unwrap();
            let peers: Vec<u32> = qps.iter().map(QueuePair::peer).collect();
            assert_eq!(peers, (0..3).filter(|peer| *peer != rank as u32).collect::<Vec<_>>());
            qps.iter().for_each(|qp| qp.check().unwrap());
        }
    }

    #[test]
    fn p7_a_poll_returns_when_its_time_is_up_and_a_peer_that_never_comes_ends_the_call() {
        let comms = ranks(2, "300ms");
        let mut alone = comms[0].begin_queue_pairs(&[(1, 0)], QpConfig::default()).unwrap();
        assert!(!alone.poll(Duration::ZERO).unwrap());
        let error = loop {
            match alone.poll(Duration::from_millis(5)) {
                Ok(ready) => assert!(!ready),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    }

    #[test]
    fn p7_queue_pairs_that_are_given_up_end_the_peers_call() {
        let comms = ranks(2, "60s");
        let first = comms[0].begin_queue_pairs(&[(1, 0)], QpConfig::default()).unwrap();
        let mut second = comms[1].begin_queue_pairs(&[(0, 0)], QpConfig::default()).unwrap();
        // The second hears of the first, and answers.
        assert!(!second.poll(Duration::from_millis(300)).unwrap(), "the first has not answered");
        drop(second);
        // The first call fails, or its queue pair was ready before the word of the end came, and ends with that.
        let error = match first.wait() {
            Ok(qps) => loop {
                match qps[0].check() {
                    Ok(()) => std::thread::sleep(Duration::from_millis(1)),
                    Err(error) => break error,
                }
            },
            Err(error) => error,
        };
        assert!(matches!(error, Error::Aborted { rank: 1 }), "{error}");
    }
}
