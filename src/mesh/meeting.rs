//! Makes queue pairs with several ranks at once: a loop that hands frames and the time to each queue pair's machine
//! ([`Connect`]) and does what the machine says, until all ends are live or one has ended.
//!
//! All offers go out before the first answer is waited for, and each answer is taken as it comes. So it does not matter in
//! which order the ranks name each other.

use std::time::{Duration, Instant};

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_engine::connect::{self, Connect, Event, Fds, Frame, Incarnation};
use pushgate_link::mailbox::Mailbox;

use super::{Channel, Mesh, SetUp, TellEnd, TellEngine};
use crate::error::{Error, Result};

/// How many frames of each end are still read after the time is up: frames that had arrived by then.
const LATE: usize = 64;

/// One end of a queue pair, as its transport has it.
pub(crate) trait End {
    /// Lets go of everything that was prepared, and makes a new offer.
    fn offer(&mut self) -> Result<Frame>;

    /// Gets ready to receive from the end whose offer this is. Returns the places that the peer is told.
    fn prepare(&mut self, offer: Frame) -> Result<Vec<u8>>;
}

/// One call that makes a queue pair. If it is dropped before [`Call::joined`], the call has failed and the peer is
/// told.
pub(crate) struct Call<'a> {
    /// `None` once the queue pair is joined.
    set_up: Option<SetUp<'a>>,
    /// `None` once the queue pair's engine has it.
    connect: Option<Connect<Fds>>,
    /// Where the peer's later frames go, once the engine has that machine.
    mailbox: Option<Mailbox>,
    /// The peer's incarnation that this end is live with, once it is.
    with: Option<Incarnation>,
}

/// What replaces the link of an end when it breaks: the machine that has met the peer, and the way of frames from and to
/// the peer.
pub(crate) struct HandedOver {
    pub(crate) connect: Connect<Fds>,
    pub(crate) mailbox: Mailbox,
    pub(crate) channel: Channel,
}

/// An end that is ready to receive, and whose peer is.
pub(crate) struct BothReady<'a, E> {
    pub(crate) end: E,
    /// Where the peer's transport may be written.
    pub(crate) places: Vec<u8>,
    pub(crate) call: Call<'a>,
}

/// An end that meets its peer.
struct Meeting<'a, E> {
    end: E,
    /// The peer's, once both ends are ready.
    places: Option<Vec<u8>>,
    call: Call<'a>,
}

/// Ends that meet their peers, all of them or none. The mesh's timeout is the limit: for the peer's first answer, then for
/// the rest.
pub(crate) struct Meetings<'a, E> {
    mesh: &'a Mesh,
    all: Vec<Meeting<'a, E>>,
    start: Instant,
    /// Frames read in a row after the time was up.
    late: usize,
}

impl<'a, E: End> Meetings<'a, E> {
    /// Sends the offers of all ends.
    pub(crate) fn begin(mesh: &'a Mesh, ends: Vec<(SetUp<'a>, E)>) -> Result<Self> {
        let mut offered = Vec::with_capacity(ends.len());
        for (set_up, mut end) in ends {
            let offer = end.offer()?;
            offered.push((set_up, end, offer));
        }
        let start = Instant::now();
        let begin = |(set_up, end, offer)| Meeting {
            end,
            places: None,
            call: Call::begin(set_up, offer, mesh.timeout, start.elapsed().as_nanos() as u64),
        };
        let all = offered.into_iter().map(begin).collect();
        let mut meetings = Meetings { mesh, all, start, late: 0 };
        for meeting in &mut meetings.all {
            meeting.go_on(start.elapsed().as_nanos() as u64, false)?;
        }
        Ok(meetings)
    }

    /// Takes what has come from the peers, and waits for more until `until`; `None`: until all ends are ready. True once all
    /// are.
    pub(crate) fn go_on(&mut self, until: Option<Instant>) -> Result<bool> {
        let Meetings { mesh, all, start, late } = self;
        let now = || start.elapsed().as_nanos() as u64;
        loop {
            let here: Vec<usize> = (0..all.len()).filter(|i| all[*i].places.is_none()).collect();
            let Some(wakes_at) = here.iter().map(|i| all[*i].call.wakes_at()).min() else { return Ok(true) };
            let of: Vec<_> = here.iter().map(|i| all[*i].call.names()).collect();
            let due = *start + Duration::from_nanos(wakes_at);
            // A peer that sends all the time does not keep a call going after its time is up.
            let found = match *late < LATE * all.len() {
                true => mesh.next_of(&of, until.map_or(due, |until| until.min(due)))?,
                false => None,
            };
            match found {
                Some((i, (bytes, fds))) => {
                    *late += (now() > wakes_at) as usize;
                    let meeting = &mut all[here[i]];
                    meeting.call.take(Frame { bytes, along: fds.into() }, now())?;
                    meeting.go_on(now(), false)?;
                }
                None if Instant::now() < due => return Ok(false),
                None => {
                    *late = 0;
                    for i in here {
                        all[i].call.machine().tick(now());
                        all[i].go_on(now(), true)?;
                    }
                }
            }
        }
    }

    /// The ends.
    ///
    /// # Panics
    ///
    /// Where [`Meetings::go_on`] has not returned true.
    pub(crate) fn ready(self) -> Vec<BothReady<'a, E>> {
        let ready = |m: Meeting<'a, E>| BothReady {
            end: m.end,
            places: m.places.expect("all ends are ready"),
            call: m.call,
        };
        self.all.into_iter().map(ready).collect()
    }
}

/// Meets the peers of all of `ends`, or none.
#[cfg(test)]
pub(crate) fn meet<'a, E: End>(mesh: &'a Mesh, ends: Vec<(SetUp<'a>, E)>) -> Result<Vec<BothReady<'a, E>>> {
    let mut meetings = Meetings::begin(mesh, ends)?;
    let all = meetings.go_on(None)?;
    assert!(all, "without a time it waits for all");
    Ok(meetings.ready())
}

impl<E: End> Meeting<'_, E> {
    /// Does everything that the machine says. `ticked`: the machine was told the time, and no frame.
    fn go_on(&mut self, now: u64, ticked: bool) -> Result<()> {
        let Call { set_up, connect, with, .. } = &mut self.call;
        let set_up = set_up.as_ref().expect("it is not joined");
        let connect = connect.as_mut().expect("it is not live");
        let peer = set_up.peer;
        while let Some(event) = connect.poll() {
            match event {
                Event::Send(frame) => match connect::ended(&frame.bytes) {
                    Ok(Some(_)) => set_up.send_end(&frame.bytes),
                    _ => set_up.send(&frame)?,
                },
                Event::Fence => {
                    let offer = self.end.offer()?;
                    connect.fenced(0, offer, now);
                }
                Event::Prepare { epoch, offer } => {
                    let places = self.end.prepare(offer)?;
                    connect.prepared(epoch, places, now);
                }
                Event::Go { places, .. } => {
                    self.places = Some(places);
                    *with = connect.peer();
                }
                Event::End(_) if ticked => {
                    let what = format!("agreeing on a queue pair with rank {peer}");
                    return Err(Error::TimedOut { what, after: set_up.mesh.timeout });
                }
                Event::End(status) => return Err(Error::from_status(status, peer)),
            }
        }
        Ok(())
    }
}

impl<'a> Call<'a> {
    pub(super) fn begin(set_up: SetUp<'a>, offer: Frame, limit: Duration, now: u64) -> Self {
        let connect = Connect::new(set_up.own, offer, limit.as_nanos() as u64, aborted(set_up.mesh), now);
        Call { set_up: Some(set_up), connect: Some(connect), mailbox: None, with: None }
    }

    fn set_up(&self) -> &SetUp<'a> {
        self.set_up.as_ref().expect("it is not joined")
    }

    fn names(&self) -> (u32, u32) {
        (self.set_up().peer, self.set_up().label)
    }

    fn wakes_at(&self) -> u64 {
        self.connect.as_ref().and_then(Connect::wakes_at).unwrap_or(u64::MAX)
    }

    fn machine(&mut self) -> &mut Connect<Fds> {
        self.connect.as_mut().expect("it is not live")
    }

    fn take(&mut self, frame: Frame, now: u64) -> Result<()> {
        let rank = self.set_up().peer;
        self.machine().take(frame, now).map_err(|e| Error::Mismatch { rank, reason: e.to_string() })
    }

    /// The peer's incarnation that this end is live with.
    fn with(&self) -> Incarnation {
        self.with.expect("it is live with one")
    }

    /// Hands out what replaces the link of this end when it breaks. [`Call::joined`] must be told then how the engine hears
    /// of the peer's frames.
    pub(crate) fn hand_over(&mut self) -> HandedOver {
        let (channel, mailbox) = self.set_up().channels();
        self.mailbox = Some(mailbox.clone());
        HandedOver { connect: self.connect.take().expect("it is handed over once"), mailbox, channel }
    }

    /// Whether [`Call::hand_over`] was called.
    pub(crate) fn is_handed_over(&self) -> bool {
        self.mailbox.is_some()
    }

    /// Makes the value that tells the peer later if this end breaks and can't say so over its own
    /// link.
    pub(crate) fn teller(&self) -> TellEnd {
        self.set_up().teller(self.with)
    }

    /// The label, and the peer's incarnation that this end is live with.
    pub(crate) fn peers(&self) -> (u32, Incarnation) {
        (self.set_up().label, self.with())
    }

    /// Records that the queue pair is made. Returns the status of the peer's end if it has ended meanwhile. `tell` tells
    /// the engine that frames of the peer wait, where the link is replaced when it breaks.
    ///
    /// From this call on, [`super::Events`] reports the peer's ends, so the caller must have
    /// recorded the queue pair before.
    pub(crate) fn joined(mut self, tell: Option<TellEngine>) -> Option<Status> {
        let (with, route) = (self.with(), self.mailbox.take().zip(tell));
        self.set_up.take().expect("it is not joined").joined(with, route)
    }
}

/// The status that the peer of a failed call is told.
fn aborted(mesh: &Mesh) -> Status {
    Status { rank: Some(mesh.rank), ..Status::new(abi::PUSHGATE_ABORTED) }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let Some(set_up) = &self.set_up else { return };
        let aborted = aborted(set_up.mesh);
        let Some(connect) = &mut self.connect else {
            set_up.send_end(&connect::end(set_up.own, self.with, aborted));
            return;
        };
        connect.abort(aborted);
        while let Some(event) = connect.poll() {
            if let Event::Send(frame) = event
                && matches!(connect::ended(&frame.bytes), Ok(Some(_)))
            {
                set_up.send_end(&frame.bytes);
            }
        }
    }
}
