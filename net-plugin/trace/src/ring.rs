//! Made traces: the calls of allreduces around a ring, as NCCL makes them, with times of an even network.

use crate::end::{Buffer, End, Event, Memory, What};
use crate::layout::{Header, MAGIC, Record, Role, VERSION};

/// Steps of NCCL's buffer for a connection.
const SLOTS: u64 = 8;
/// Bytes of a step of NCCL's buffer.
const SLOT: u64 = 512 << 10;
/// Nanoseconds of a step.
const STEP: u64 = 30_000;

/// Allreduces around a ring of hosts. In each channel the data enter a host at one of its GPUs and leave it at another, where there
/// are several; the hops inside a host are no calls of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Hosts, two at least.
    pub hosts: u64,
    /// GPUs of a host, each with a process.
    pub gpus: u64,
    /// Channels.
    pub channels: u64,
    /// Bytes of an allreduce.
    pub bytes: u64,
    /// Allreduces, one after the other.
    pub rounds: u64,
}

impl Ring {
    /// Both ends of all connections.
    ///
    /// # Panics
    ///
    /// If there are fewer than two hosts, or none of something.
    pub fn ends(&self) -> Vec<End> {
        assert!(self.hosts > 1 && self.gpus > 0 && self.channels > 0 && self.rounds > 0, "{self:?}");
        let mut ends = Vec::new();
        let mut of_process = vec![0; (self.hosts * self.gpus) as usize];
        for channel in 0..self.channels {
            for host in 0..self.hosts {
                let first = |host: u64| host * self.gpus + channel % self.gpus;
                let last = host * self.gpus + (channel + self.gpus - 1) % self.gpus;
                for (process, role) in [(last, Role::Send), (first((host + 1) % self.hosts), Role::Receive)] {
                    let number = &mut of_process[process as usize];
                    ends.push(self.end(process, *number, channel * self.hosts + host, role));
                    *number += 1;
                }
            }
        }
        ends
    }

    /// The lengths of the messages of a step: a rank's part of the channel's bytes, in slices that a slot holds.
    fn slices(&self) -> impl Iterator<Item = u64> {
        let part = self.bytes / self.channels / (self.hosts * self.gpus);
        (0..part.div_ceil(SLOT).max(1)).map(move |slice| (part - slice * SLOT).min(SLOT))
    }

    fn end(&self, process: u64, number: u32, connection: u64, role: Role) -> End {
        let name = |of: u64| (u128::from(of) + 1).to_be_bytes();
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            record: size_of::<Record>() as u32,
            process: name(process),
            connection: name(connection),
            boot: [0; 16],
            pid: process as u32 + 1,
            end: number,
            device: 0,
            cores: 1,
            role,
            zero: [0; 7],
        };
        let base = (u64::from(number) + 1) << 32;
        let begin = 1_000_000_000;
        let event = |time, what| Event { time, took: 100, thread: 0, what };
        let mut events = vec![
            event(0, What::Made),
            event(1, What::Register { address: base, size: SLOTS * SLOT, memory: Memory::Host }),
        ];
        let steps = 2 * (self.hosts * self.gpus - 1);
        let slices: Vec<u64> = self.slices().collect();
        let sizes = (0..self.rounds * steps).flat_map(|step| slices.iter().map(move |size| (step, *size)));
        let mut dones: Vec<u64> = Vec::new();
        for (message, (step, size)) in (0u64..).zip(sizes) {
            let (slice, slot) = (message % slices.len() as u64, message % SLOTS);
            let at = begin + step * STEP + slice * 100;
            let (post, done) = match role {
                // A receive is posted as soon as its slot is free.
                Role::Receive => (
                    message.checked_sub(SLOTS).map_or(begin, |before| dones[before as usize] + 200),
                    at + 20_000,
                ),
                Role::Send => {
                    let free = message.checked_sub(SLOTS).map_or(0, |before| dones[before as usize] + 200);
                    let post = at.max(free);
                    (post, post + 10_000)
                }
            };
            let done = done.max(post + 1000).max(dones.last().map_or(0, |last| last + 1));
            dones.push(done);
            let room = if role == Role::Receive { SLOT } else { size };
            let buffer = Buffer { address: base + slot * SLOT, size: room, tag: 0, registered: true };
            let request = message as u32;
            events.push(event(post, What::Post { request, refused: 0, buffers: vec![buffer] }));
            events.push(event(done, What::Done { request, tests: 1, sizes: vec![size] }));
        }
        events.sort_by_key(|event| event.time);
        let over = events.last().map_or(begin, |last| last.time) + STEP;
        events.push(event(over, What::Deregister { address: base, size: SLOTS * SLOT }));
        events.push(event(over + 1, What::Closed { left_out: 0 }));
        End { header, events }
    }
}
