//! Two endpoints over any two links, for tests of links: their programs post PUTs, SENDs and signals whose payloads say whose they
//! are, and what arrives is checked.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pushgate_core::connect::{Connect, Event, Incarnation};
use pushgate_core::recovery::Patience;
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::{HugePages, ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::endpoint::{Endpoint, QpOptions};
use pushgate_link::Link;
use pushgate_link::frame::{Fds, Frame};
use pushgate_link::mailbox::Mailbox;
use pushgate_link::producer::{Producer, Received};
use pushgate_link::region::RegionMemory;
use pushgate_tests::hang;

/// A status that an end can end with.
pub const ABORTED: Status = Status { code: abi::PUSHGATE_ABORTED as u8, rank: Some(0), detail: 0 };

const UNIT: usize = abi::PUSHGATE_UNIT as usize;
/// Words of a stripe: each is written by one PUT after the other.
pub const STRIPE: usize = 40;
/// Stripes of a region.
pub const STRIPES: usize = 6;
/// Bytes of a region.
pub const REGION: usize = STRIPE * STRIPES * 8;

/// The rings of each end.
pub const GEOMETRY: Geometry = Geometry {
    window_log: 6,
    slots_log: 4,
    cq_log: 4,
    rx_log: 3,
    link_log: 3,
    landing_log: 6,
    signals: 1,
    rank: 0,
};

/// Numbers that look random (xorshift64).
pub struct Random(pub u64);

impl Random {
    /// The next one.
    #[expect(clippy::should_implement_trait, reason = "the numbers are no sequence with an end")]
    pub fn next(&mut self) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 as usize >> 8
    }
}

/// Memory in small pages.
pub fn memory(name: &str, bytes: usize) -> Arc<SharedMemory> {
    Arc::new(SharedMemory::builder(name, bytes).huge_pages(HugePages::Never).create().unwrap())
}

/// One end with its program's device.
pub struct End {
    /// The end of the queue pair.
    pub endpoint: Endpoint,
    /// The program's device.
    pub device: Producer,
    control: Arc<SharedMemory>,
    window: Arc<SharedMemory>,
    mirror: Arc<SharedMemory>,
    /// The memory of its region.
    pub region: Arc<SharedMemory>,
    /// The region's key.
    pub key: u32,
    /// Messages posted.
    pub posted: u64,
    /// The last PUT to each stripe.
    pub last: [u64; STRIPES],
    /// The simulated time, nanoseconds. It stands still unless a test says otherwise.
    pub now: u64,
    /// Bodies of the SENDs posted.
    pub sends: Vec<u64>,
    /// How many of them the peer has taken in.
    pub taken: usize,
}

/// Both ends of a queue pair over these links, which know each other's regions. `act` lets the devices work.
pub fn ends(
    links: Vec<Box<dyn Link>>,
    windows: [Arc<SharedMemory>; 2],
    mirrors: [Arc<SharedMemory>; 2],
    posted_receives: bool,
    act: impl Fn(),
) -> [End; 2] {
    let mut ends = ends_alone(GEOMETRY, links, windows, mirrors, posted_receives);
    // A program has the key of a region when the peer has its entry.
    let begin = Instant::now();
    while !ends.iter().all(|end| end.endpoint.regions_told()) {
        assert!(begin.elapsed() < hang(), "no end hears of the other's region");
        ends.iter_mut().for_each(End::poll);
        act();
    }
    ends
}

/// Both ends of a queue pair over these links, with rings of this geometry; one link may be another's.
pub fn ends_alone(
    geometry: Geometry,
    links: Vec<Box<dyn Link>>,
    windows: [Arc<SharedMemory>; 2],
    mirrors: [Arc<SharedMemory>; 2],
    posted_receives: bool,
) -> [End; 2] {
    let mut all = links.into_iter().zip(windows).zip(mirrors);
    [0, 1].map(|rank: u32| {
        let ((qp, window), mirror) = all.next().unwrap();
        let (geometry, peer_geometry) =
            (Geometry { rank, ..geometry }, Geometry { rank: 1 - rank, ..geometry });
        let (work, control) =
            (memory("work", geometry.work_bytes()), memory("control", geometry.control_bytes()));
        let options = QpOptions {
            peer: 1 - rank,
            roles: false,
            posted_receives,
            reader_flushes: false,
            stuck_ns: 1_000_000_000,
            in_place_share: 128,
            slow_ns: 0,
            ungated: false,
            key_seed: 7 + rank,
        };
        let fd = work.fd().try_clone_to_owned().unwrap();
        let read = Arc::new(ReadOnlyMemory::from_fd(fd, work.len()).unwrap());
        let mut endpoint =
            Endpoint::new(read, control.clone(), geometry, peer_geometry, qp, options).unwrap();
        let region = memory("region", REGION);
        let at =
            RegionMemory::Host { address: region.as_ptr().as_ptr() as usize, keep: Some(region.clone()) };
        let key = endpoint.add_region(at, REGION as u64).unwrap();
        let device = Producer::new(geometry, &work, &control, window.clone(), None);
        let (last, sends) = ([0; STRIPES], Vec::new());
        End {
            endpoint,
            device,
            control,
            window,
            mirror,
            region,
            key,
            posted: 0,
            last,
            now: 0,
            sends,
            taken: 0,
        }
    })
}

impl End {
    /// The memory that may lie in a device: this end's window and region.
    pub fn of_device(&self) -> [&Arc<SharedMemory>; 2] {
        [&self.window, &self.region]
    }

    /// One pass of its engine.
    pub fn poll(&mut self) {
        self.endpoint.poll(&mut None);
        self.endpoint.tick(self.now);
    }

    /// Posts one message to `peer`: its payload is its number, again and again.
    pub fn post(&mut self, peer_key: u32, random: &mut Random) {
        let number = self.posted + 1;
        let words = words(random.0);
        random.next();
        let payload: Vec<u8> = std::iter::repeat_n(number.to_ne_bytes(), words).flatten().collect();
        let stripe = random.next() % STRIPES;
        let put = Record {
            flags: Record::WITH_SIGNAL,
            rkey: peer_key,
            remote_offset: (stripe * STRIPE * 8) as u64,
            signal_value: number,
            ..Record::new(Opcode::Put)
        };
        match random.next() % 8 {
            0..3 if self.device.post(Record::new(Opcode::Send), &payload) => self.sends.push(number),
            3..7 if self.device.post(put, &payload) => self.last[stripe] = number,
            7 if self.device.post(Record { flags: 0, opcode: Opcode::Signal, ..put }, &[]) => {}
            _ => return,
        }
        self.posted = number;
    }

    /// Posts a SEND as the last message. True if there was room, now or before.
    pub fn posts_its_last(&mut self) -> bool {
        const LAST: u64 = u64::MAX;
        if self.sends.last() != Some(&LAST)
            && self.device.post(Record::new(Opcode::Send), &LAST.to_ne_bytes())
        {
            self.sends.push(LAST);
        }
        self.sends.last() == Some(&LAST)
    }

    /// The words of a stripe of our region.
    pub fn stripe(&self, stripe: usize) -> Vec<u64> {
        self.region.words(stripe * STRIPE * 8, STRIPE).iter().map(|w| w.load(Ordering::Relaxed)).collect()
    }

    /// The words of a message's payload, wherever it lies.
    fn payload(&self, m: &Received) -> Vec<u64> {
        let words = m.length as usize / 8;
        let (memory, base) = match m.flags & Record::LANDING != 0 {
            true => (&self.control, GEOMETRY.control_landing_offset()),
            false => (&self.mirror, 0),
        };
        let at = base + m.place as usize * UNIT;
        memory.words(at, words).iter().map(|w| w.load(Ordering::Relaxed)).collect()
    }

    /// Takes in what `from` sent: each SEND is whole and the next one.
    pub fn take(&mut self, from: &mut End) {
        while let Some(m) = self.device.try_recv() {
            let number = from.sends[from.taken];
            assert_eq!(self.payload(&m), vec![number; m.length as usize / 8], "SEND {number}, {m:?}");
            from.taken += 1;
            self.device.release(1);
        }
    }
}

/// How many words the message has that is posted when the random numbers are in this state.
pub fn words(state: u64) -> usize {
    [1, 2, 17, 18, STRIPE][Random(state).next() % 5]
}

/// Messages of each PUT's first words: which PUT to a stripe was the last that the signal covers.
pub fn check_signal(receiver: &End, puts: &[Vec<(u64, usize)>; STRIPES]) {
    // What the signal announces was complete when the signal was written: look at the signal first.
    let signal = receiver.device.signal(0);
    for (stripe, puts) in puts.iter().enumerate() {
        let words = receiver.stripe(stripe);
        for (i, word) in words.iter().enumerate() {
            let covering = puts.iter().filter(|(_, n)| i < *n);
            let least = covering.filter(|(number, _)| *number <= signal).map(|p| p.0).max().unwrap_or(0);
            assert!(
                *word >= least,
                "stripe {stripe}, word {i} is of PUT {word}; signal {signal} covers {least}"
            );
        }
    }
}

/// Machines of two ends that have just met.
pub fn met() -> [Connect<Fds>; 2] {
    let gives_up = Status::new(abi::PUSHGATE_ABORTED);
    let mut ends = [1, 2]
        .map(|n| Connect::new(Incarnation::new(n).unwrap(), Frame::default(), 1_000_000_000, gives_up, 0));
    let mut live = [false; 2];
    while live != [true; 2] {
        for at in [0, 1] {
            while let Some(event) = ends[at].poll() {
                match event {
                    Event::Send(frame) => ends[1 - at].take(frame, 0).unwrap(),
                    Event::Prepare { epoch, .. } => ends[at].prepared(epoch, Vec::new(), 0),
                    Event::Go { .. } => live[at] = true,
                    event => panic!("{event:?}"),
                }
            }
        }
    }
    ends
}

/// Has the links of both ends replaced when they break.
pub fn recovering(ends: [End; 2]) -> [End; 2] {
    let mailboxes: [Mailbox; 2] = Default::default();
    let mut connects = met().map(Some);
    let mut i = 0;
    ends.map(|end| {
        let (to, connect) = (mailboxes[1 - i].clone(), connects[i].take().unwrap());
        let patience = Patience::within(Duration::from_secs(60), i as u64);
        let send = Box::new(move |frame| _ = to.put(frame));
        let endpoint = end.endpoint.with_recovery(connect, patience, mailboxes[i].clone(), send);
        i += 1;
        End { endpoint, ..end }
    })
}
