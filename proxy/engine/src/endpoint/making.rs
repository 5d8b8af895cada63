//! How an endpoint is made: the memory and the options that its program hands over, and what is refused of them.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pushgate_core::gate::Gate;
use pushgate_core::inbound::{Inbound, Rules};
use pushgate_core::journal::Broken;
use pushgate_core::outbound::Outbound;
use pushgate_core::session::Session;
use pushgate_core::staging::Staging;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::{Bell, Ring};
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::segment::{Geometry, Segment, check_header};
use pushgate_driver_shim::window::Interrupt;
use pushgate_link::local::{LocalLink, Processes};
use pushgate_link::memory::{Mapped, Words};
use pushgate_link::region::Regions;
use pushgate_link::segments::{ControlOfEngine, SegmentError, WorkAtEngine};
use pushgate_link::{HostProcess, Link, PeerCounts, PeerProcess};

use super::{Endpoint, Here, Moves, Stands, TellBroken, record};
use crate::counters::Counters;

/// The memory of one queue pair, as its program hands it to an engine. Every
/// segment's header is checked before anything else is read.
pub struct QpMemory {
    /// Work segment: the device writes it, and this end reads it.
    pub work: Arc<ReadOnlyMemory>,
    /// Control segment: this end writes it, and the device reads it.
    pub control: Arc<SharedMemory>,
    /// This end's link segment.
    pub link: Arc<SharedMemory>,
    /// The peer's link segment.
    pub peer_link: Arc<ReadOnlyMemory>,
    /// The peer's window.
    pub peer_window: Arc<ReadOnlyMemory>,
    /// What the peer rings to wake this engine, if this engine sleeps.
    pub bell: Option<Bell>,
    /// Wakes the peer's engine, where it can be woken.
    pub peer_bell: Option<Ring>,
    /// The peer's process, by its number in this process's PID namespace: payload that the peer sends out of regions is
    /// read there.
    pub peer_pid: Option<u32>,
    /// This engine runs in the process of its program, whose number the peer knows: the peer can read regions there.
    pub in_program: bool,
}

/// Options of an endpoint.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
pub struct QpOptions {
    /// The peer's rank.
    pub peer: u32,
    /// The ranks are the roles of a connection's ends: 0 sends, 1 receives. For reports alone; a proxy process is not told.
    #[serde(skip)]
    pub roles: bool,
    /// SENDs land in the buffers that posted receives name. The device waits for what the peer sends by receives alone, so messages of
    /// a peer that has ended stay for receives that the device posts later.
    pub posted_receives: bool,
    /// The program makes sure that what an RDMA device wrote into a device's memory is there before the program uses it
    /// (P3). Otherwise the engine does so by its mover, before it shows each such message.
    pub reader_flushes: bool,
    /// A slot that is reserved and not published, while later slots are complete, ends the queue pair after this time,
    /// nanoseconds.
    pub stuck_ns: u64,
    /// Share of the peer's window, in 256ths, that a slow reader may hold in place. Messages beyond the share are copied
    /// out.
    pub in_place_share: u8,
    /// A reader that holds messages and gives none back for this long is slow, nanoseconds. Messages are copied out for
    /// slow readers alone.
    pub slow_ns: u64,
    /// Receive credits are ignored; for tests alone.
    pub ungated: bool,
    /// Seed of the regions' tags.
    pub key_seed: u32,
}

/// Why an endpoint could not be made.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// A segment is not what the queue pair needs.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The peer's window is smaller than its geometry says.
    #[error("the peer's window has {found} bytes, its geometry says {expected}")]
    Window {
        /// Bytes mapped.
        found: usize,
        /// Bytes that there should be.
        expected: usize,
    },
    /// The peer was told the opposite: it would wait for receives that this end never announces, or look for none.
    #[error(
        "posted_receives is {options} in QpOptions, but queue pair `{qp}` was offered to the peer with {offered}: \
         set both alike"
    )]
    PostedReceives {
        /// The transport.
        qp: &'static str,
        /// Whether the endpoint posts receives.
        options: bool,
        /// What the peer was told.
        offered: bool,
    },
    /// What is kept of the session can't be gone on with.
    #[error(transparent)]
    Session(#[from] Broken),
    /// `ungated` is set in a build without the feature `test-ungated`.
    #[error("this build cannot switch the gate's receive credit off")]
    Ungated,
}

fn header(
    words: &[AtomicU64],
    kind: Segment,
    name: &'static str,
    len: usize,
) -> Result<Geometry, SegmentError> {
    check_header(words, kind, len).map_err(|source| SegmentError::Header { segment: name, source })
}

impl Endpoint {
    /// A queue pair over the `local` transport.
    pub fn local(memory: QpMemory, options: QpOptions) -> Result<Self, EndpointError> {
        let geometry = header(memory.control.words(0, 8), Segment::Control, "control", memory.control.len())?;
        let page = abi::PUSHGATE_PAGE as usize;
        let check = |mem: &Arc<ReadOnlyMemory>, kind, name| {
            header(&Words::readable(mem, 0, 8.min(mem.len().min(page) / 8)), kind, name, mem.len())
        };
        let work = check(&memory.work, Segment::Work, "work")?;
        let link = header(memory.link.words(0, 8), Segment::Link, "link", memory.link.len())?;
        for (segment, found) in [("work", work), ("link", link)] {
            if found != geometry {
                return Err(SegmentError::Disagree {
                    segment,
                    found: Box::new(found),
                    expected: Box::new(geometry),
                }
                .into());
            }
        }
        let peer_geometry = check(&memory.peer_link, Segment::Link, "peer's link")?;
        if memory.peer_window.len() < peer_geometry.window_bytes() {
            return Err(EndpointError::Window {
                found: memory.peer_window.len(),
                expected: peer_geometry.window_bytes(),
            });
        }
        let recorded = record::Recorded::local(&memory);
        let peer = memory.peer_pid.map(|pid| Box::new(HostProcess::of(pid)) as Box<dyn PeerProcess>);
        let qp = LocalLink::new(
            &memory.link.into(),
            &geometry,
            &memory.peer_link.into(),
            &peer_geometry,
            memory.peer_window.into(),
            (memory.bell, memory.peer_bell),
            Processes { peer, in_program: memory.in_program },
        );
        let qp = Box::new(qp);
        let endpoint = Self::new(memory.work, memory.control, geometry, peer_geometry, qp, options)?;
        Ok(Endpoint { recorded, ..endpoint })
    }

    /// A queue pair over any transport; both geometries are checked.
    pub fn new(
        work: impl Into<Mapped>,
        control: impl Into<Mapped>,
        geometry: Geometry,
        peer_geometry: Geometry,
        qp: Box<dyn Link>,
        options: QpOptions,
    ) -> Result<Self, EndpointError> {
        let (work, control) = (work.into(), control.into());
        if let Some(offered) = qp.offered_receives()
            && offered != options.posted_receives
        {
            return Err(EndpointError::PostedReceives {
                qp: qp.name(),
                options: options.posted_receives,
                offered,
            });
        }
        let (receives, budget) = ((1 << peer_geometry.rx_log) + qp.goes_ahead(), qp.budget());
        let gate = if options.ungated {
            #[cfg(feature = "test-ungated")]
            {
                Gate::without_receive_credit(receives, budget)
            }
            #[cfg(not(feature = "test-ungated"))]
            return Err(EndpointError::Ungated);
        } else {
            Gate::new(receives, budget)
        };
        let (knows_receives, ahead) = (qp.knows_receives(), qp.takes_ahead());
        let g = &geometry;
        Ok(Endpoint {
            work: WorkAtEngine::new(&work, g),
            control: ControlOfEngine::new(&control, g),
            outbound: Outbound::new(Staging::new(g.slots_log, g.window_log), gate),
            session: Session::new(0),
            here: Here { regions: Regions::new(options.key_seed), qp, copies: false },
            knows_receives,
            inbound: Inbound::new(Rules {
                rx_log: g.rx_log,
                landing_log: g.landing_log,
                signals: g.signals,
                in_place: (options.in_place_share as u64) << peer_geometry.window_log >> 8,
                slow_ns: options.slow_ns,
                posted_receives: options.posted_receives,
                ahead,
            }),
            next_scan: 0,
            moves: Moves::new(),
            acknowledged: PeerCounts::default(),
            counters: Counters::default(),
            geometry,
            peer_geometry,
            options,
            interrupt: None,
            broken: None,
            recorded: record::Recorded::default(),
            journal: None,
            sends: 0,
            recovering: None,
            stands: Stands::Live,
            shown: false,
            now: 0,
        })
    }

    /// Has the device ring `interrupt` whenever the device has published something, instead of looking
    /// whether the engine sleeps.
    pub fn with_interrupt(mut self, interrupt: Option<Box<dyn Interrupt>>) -> Self {
        self.interrupt = interrupt;
        self
    }

    /// Has `tell` called once with the cause if the transport breaks: the transport may be
    /// unable to tell the peer of its own end. Called on the engine's thread, so it must not
    /// wait.
    pub fn with_broken(mut self, tell: TellBroken) -> Self {
        self.broken = Some(tell);
        self
    }

    /// Has the device see its own segments alone, and not where the transport puts what comes:
    /// a SEND's payload is copied into the landing ring, which lies in the control segment.
    pub fn with_inbound_copied(mut self) -> Self {
        self.here.copies = true;
        self
    }
}
