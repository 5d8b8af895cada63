//! P1, with P3 to P6: random messages in both directions, under random schedules of both engines and devices.

use proptest::prelude::*;
use proptest::test_runner::Config;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::endpoint::QpOptions;

use crate::bytes;
use crate::common::*;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Inline,
    Window,
    Put,
    PutInline,
    Signal,
}

#[derive(Clone, Copy, Debug)]
struct Planned {
    kind: Kind,
    length: usize,
    signaled: bool,
}

impl Planned {
    fn is_send(&self) -> bool {
        matches!(self.kind, Kind::Inline | Kind::Window)
    }
}

fn planned(largest: usize) -> impl Strategy<Value = Planned> {
    let kind = prop_oneof![
        3 => Just(Kind::Inline),
        4 => Just(Kind::Window),
        2 => Just(Kind::Put),
        1 => Just(Kind::PutInline),
        1 => Just(Kind::Signal),
    ];
    (kind, any::<u32>(), any::<bool>()).prop_map(move |(kind, r, signaled)| {
        let length = match kind {
            Kind::Inline => r as usize % 41,
            Kind::PutInline => r as usize % 17,
            Kind::Signal => 0,
            // Often whole units or the whole ring, otherwise any length.
            _ => match r % 4 {
                0 => largest,
                1 => r as usize / 4 % (largest / UNIT + 1) * UNIT,
                _ => r as usize / 4 % (largest + 1),
            },
        };
        Planned { kind, length, signaled }
    })
}

fn geometry() -> impl Strategy<Value = Geometry> {
    (0u32..5, 1u32..5, 0u32..4, 1u32..4, 1u32..5, 0u32..6).prop_map(|(w, s, c, r, l, landing)| Geometry {
        window_log: w,
        slots_log: s,
        cq_log: c,
        rx_log: r,
        link_log: l,
        landing_log: landing,
        signals: 3,
        rank: 0,
    })
}

/// One direction: what is to be sent, and how far both devices are.
struct Flow {
    from: usize,
    plan: Vec<Planned>,
    /// Where each put lands in the receiver's region.
    offsets: Vec<usize>,
    region: Region,
    rkey: u32,
    posted: usize,
    nops: u64,
    completed: usize,
    received: usize,
    seen: usize,
    held: Vec<(Message, usize)>,
}

impl Flow {
    fn new(pair: &mut Pair, from: usize, plan: Vec<Planned>) -> Self {
        let mut end = 0;
        let offsets = plan
            .iter()
            .map(|p| {
                let at = end;
                end += p.length;
                at
            })
            .collect();
        let region = Region::new(end.max(1));
        let rkey = pair.ends[1 - from].add_region(region.memory(), region.bytes as u64).unwrap();
        Flow {
            from,
            plan,
            offsets,
            region,
            rkey,
            posted: 0,
            nops: 0,
            completed: 0,
            received: 0,
            seen: 0,
            held: Vec::new(),
        }
    }

    fn content(&self, i: usize) -> Vec<u8> {
        bytes((self.from as u64) << 32 | i as u64, self.plan[i].length)
    }

    fn post(&mut self, device: &mut Device) {
        let i = self.posted;
        let Some(p) = self.plan.get(i) else { return };
        let id = i as u32;
        let flags = if p.signaled { Record::SIGNALED } else { 0 };
        let put = Record {
            flags: flags | Record::WITH_SIGNAL,
            id,
            rkey: self.rkey,
            remote_offset: self.offsets[i] as u64,
            signal: id % 3,
            signal_value: i as u64 + 1,
            ..Record::new(Opcode::Put)
        };
        let record = match p.kind {
            Kind::Inline => Record { flags: flags | Record::INLINE, ..inline_send(id) },
            Kind::Window => Record { flags, ..window_send(id) },
            Kind::Put => put,
            Kind::PutInline => Record { flags: put.flags | Record::INLINE, ..put },
            Kind::Signal => Record { opcode: Opcode::Signal, flags, ..put },
        };
        self.posted += device.post(record, &self.content(i)) as usize;
    }

    /// Does what a kernel does that has reserved and then has nothing to send.
    fn nop(&mut self, device: &mut Device, units: u64) {
        if let Some((slot, place)) = device.take(units, false) {
            let nop = Record { place: place as u32, place_offset: units, ..Record::new(Opcode::Nop) };
            device.publish(slot, &nop.encode(0));
            self.nops += 1;
        }
    }

    fn poll_cq(&mut self, device: &mut Device) {
        while let Some(c) = device.poll_cq() {
            let next = (self.completed..self.plan.len()).find(|i| self.plan[*i].signaled);
            let i = next.expect("a completion too many");
            assert_eq!((c.wr_id, c.status as u32), (i as u32, abi::PUSHGATE_OK), "P5: once, in order");
            assert_eq!(c.length as usize, self.plan[i].length);
            self.completed = i + 1;
        }
    }

    fn recv(&mut self, device: &mut Device) {
        let Some(m) = device.try_recv() else { return };
        let i = (self.received..self.plan.len()).find(|i| self.plan[*i].is_send()).expect("one too many");
        assert!(i < self.posted);
        assert_eq!((m.tag, m.length as usize), (i as u32, self.plan[i].length), "P6: once, in order");
        self.received = i + 1;
        self.held.push((m, i));
        self.check_held(device, 0..self.held.len());
    }

    /// P1: what a reader holds stays unchanged.
    fn check_held(&self, device: &Device, which: std::ops::Range<usize>) {
        for (m, i) in &self.held[which] {
            let mut found = vec![0; m.length as usize];
            device.read(m, &mut found);
            assert_eq!(found, self.content(*i), "message {i}");
        }
    }

    fn release(&mut self, device: &mut Device, count: usize) {
        let count = count.min(self.held.len());
        if count > 0 {
            self.check_held(device, 0..count);
            self.held.drain(..count);
            device.release(count as u64);
        }
    }

    /// P3: a reader that sees a signal sees the data before it.
    fn look_at_signals(&mut self, device: &Device) {
        for i in self.seen..self.plan.len() {
            if self.plan[i].is_send() {
                continue;
            }
            let value = device.signal(i as u32 % 3);
            assert!(value <= self.posted as u64, "a signal that nobody sent");
            if value <= i as u64 {
                break;
            }
            let p = self.plan[i];
            assert_eq!(self.region.read(self.offsets[i], p.length), self.content(i), "P3: put {i}");
            self.seen = i + 1;
        }
    }

    /// P4: no message was released for which the receiver had not granted a receive.
    fn check_credits(&self, pair: &Pair, rx_log: u32) {
        let released = pair.ends[self.from].counters().released as usize;
        let sends = self.plan[..released].iter().filter(|p| p.is_send()).count() as u64;
        assert!(
            sends <= pair.devices[1 - self.from].released() + (1 << rx_log),
            "P4: {sends} sends released"
        );
    }

    fn done(&self) -> bool {
        let open = |from: usize, what: fn(&Planned) -> bool| self.plan[from..].iter().any(what);
        self.posted == self.plan.len()
            && self.held.is_empty()
            && !open(self.completed, |p| p.signaled)
            && !open(self.received, Planned::is_send)
            && !open(self.seen, |p| !p.is_send())
    }
}

proptest! {
    #![proptest_config(Config::with_cases(300))]

    #[test]
    fn p1_p3_p4_p5_p6_any_schedule_delivers_everything_once_in_order(
        (geometry, plans) in geometry().prop_flat_map(|g| {
            let plan = || prop::collection::vec(planned(UNIT << g.window_log), 0..60);
            (Just(g), [plan(), plan()])
        }),
        share in any::<u8>(),
        steps in prop::collection::vec((0u8..20, any::<u8>()), 0..400),
    ) {
        let with = |peer| QpOptions { in_place_share: share, ..options(peer) };
        let mut pair = Pair::new(geometry, [with(1), with(0)]);
        let [a, b] = plans;
        let mut flows = [Flow::new(&mut pair, 0, a), Flow::new(&mut pair, 1, b)];
        let mut now = 0;
        let mut step = |pair: &mut Pair, flows: &mut [Flow; 2], kind: u8, r: u8| {
            let flow = &mut flows[(kind & 1) as usize];
            let (from, to) = (flow.from, 1 - flow.from);
            match kind >> 1 {
                0 | 1 => (0..r % 8).for_each(|_| flow.post(&mut pair.devices[from])),
                2 | 3 => _ = pair.poll(from),
                4 => flow.recv(&mut pair.devices[to]),
                5 => (0..r % 8).for_each(|_| flow.recv(&mut pair.devices[to])),
                6 => flow.release(&mut pair.devices[to], r as usize % 4),
                7 => flow.poll_cq(&mut pair.devices[from]),
                8 => flow.nop(&mut pair.devices[from], r as u64 % ((1 << geometry.window_log) + 1)),
                _ => {
                    now += r as u64 * 1_000_000;
                    pair.tick(now);
                }
            }
            for flow in flows {
                flow.look_at_signals(&pair.devices[1 - flow.from]);
                flow.check_credits(pair, geometry.rx_log);
            }
        };
        for (kind, r) in steps {
            step(&mut pair, &mut flows, kind, r);
        }
        let mut rounds = 0;
        while !flows.iter().all(Flow::done) {
            for kind in [0, 1, 4, 5, 10, 11, 12, 13, 14, 15] {
                step(&mut pair, &mut flows, kind, 3);
            }
            rounds += 1;
            prop_assert!(rounds < 10_000, "it stands still");
        }
        pair.settle();
        pair.assert_clean();
        for f in &flows {
            let (sender, receiver) = (pair.ends[f.from].counters(), pair.ends[1 - f.from].counters());
            let (n, sum) = (f.plan.len() as u64, f.plan.iter().map(|p| p.length as u64).sum::<u64>());
            prop_assert_eq!((sender.released, sender.retired, receiver.delivered), (n, n, n));
            prop_assert_eq!((sender.released_bytes, receiver.delivered_bytes), (sum, sum));
            prop_assert!(sender.nops >= f.nops);
            prop_assert_eq!(pair.devices[f.from].delivered(), pair.devices[f.from].slots());
            f.region.check_guards();
        }
    }
}
