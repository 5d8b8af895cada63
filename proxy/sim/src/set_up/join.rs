//! The transport of an end, and its link and its endpoint once the ends have met.

use std::sync::Arc;
use std::time::Duration;

use pushgate_core::rails::Rules;
use pushgate_core::recovery::Patience;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::{self, Bell, Ringer};
use pushgate_driver_shim::segment::{Geometry, Segment, write_header};
use pushgate_driver_shim::window::Window;
use pushgate_engine::connect::{
    LocalMet, LocalOpening, Met, Opening, RailFrames, RailsOpening, TcpOpening, VerbsOpening,
};
use pushgate_engine::endpoint::{Endpoint, QpOptions};
use pushgate_link::Link;
use pushgate_link::local::{LocalLink, Processes};
use pushgate_link::memory::{Mapped, Words};
use pushgate_link::region::RegionMemory;
use pushgate_link_tcp::Config as TcpConfig;
use pushgate_link_verbs::Config;

use crate::cluster::Cluster;
use crate::flaky::Flaky;
use crate::kept::Kept;
use crate::memory::{self, Guarded, SimulatedProcess, allocate};
use crate::plan::{Carrier, MS, Posts, S};
use crate::qp::{Memory, Qp};
use crate::rails;

/// Limits of a rail's recovery.
const PATIENCE: Patience =
    Patience { attempt: 20 * MS, first_pause: MS, longest_pause: 50 * MS, whole: 10 * S, jitter: 0 };
/// A slot that is never published ends its queue pair after this time.
const STUCK: u64 = 3 * S;

impl Cluster<'_> {
    /// An end's program calls again: nothing of its earlier call is used.
    pub(super) fn make_anew(&mut self, qp: usize, end: usize) {
        let q = &mut self.qps[qp];
        for device in [self.nic].into_iter().chain(self.rails) {
            device.is_of_device(2 * qp + end, 0..0);
        }
        q.memory[end] = Memory::new(q.memory[end].geometry);
        q.sides[end] = q.memory[end].side(q.ranks[end], &q.regions[end], q.sides[end].buffer);
        let bell = self.nodes[q.nodes[end]].bell();
        self.programs[2 * qp + end].producer = q.memory[end].producer(bell);
    }

    /// Opens an end's transport.
    pub(super) fn open(&self, qp: usize, end: usize) -> Opening {
        let (q, e) = (&self.qps[qp], &self.plan.qps[qp].ends[end]);
        let (window, posted_receives) = (q.memory[end].window.clone(), e.posts != Posts::Nothing);
        // A window in a BAR, and GPU memory that messages go out of.
        let (at, source) = (window.as_ptr().as_ptr() as usize, &self.programs[2 * qp + end].source);
        for device in [self.nic].into_iter().chain(self.rails) {
            device.is_of_device(2 * qp + end, at..at + window.len());
            let source = source.address()..source.address() + source.bytes();
            device.is_of_device(usize::MAX - (2 * qp + end), source);
        }
        if let Carrier::Devices { devices } = q.carrier {
            let devices: Vec<_> =
                self.rails[..devices as usize].iter().map(|device| device.device.clone()).collect();
            let config =
                Config { posted_receives, regions_written: e.regions_written, ..self.profile.config() };
            let window: Arc<dyn Window> = window;
            let opening = RailsOpening::new(&devices, &config, e.geometry, &window, &mut allocate);
            return Opening::Rails(opening.expect("queue pairs of the simulated devices"));
        }
        if let Carrier::Tcp { streams, part, checksum, ahead } = q.carrier {
            let config = TcpConfig {
                streams: streams.into(),
                checksum,
                posted_receives,
                ahead,
                thrifty: ahead % 2 != 0,
                beat: 10 * MS,
            };
            let net = q.net.as_ref().expect("it is made with the queue pair");
            let meeting = net.meeting(end, &self.nodes[q.nodes[end]].time);
            let opening =
                TcpOpening::new(config, e.geometry, window, meeting).expect("a place of the simulation");
            let opening = opening.in_parts(part as usize);
            return Opening::Tcp(Box::new(match self.plan.qps[qp].recovers {
                true => opening.recovering(),
                false => opening,
            }));
        }
        let Carrier::Verbs { imm } = q.carrier else {
            let link = allocate("link", e.geometry.link_bytes()).expect("memory for a link segment");
            write_header(&link, Segment::Link, &e.geometry).expect("a segment of this geometry");
            let rings = self.plan.nodes[q.nodes[end]].doorbell;
            let bells = rings.then(|| bell::pair().expect("a pair of sockets"));
            return Opening::Local(LocalOpening::new(Arc::new(link), window, posted_receives, bells));
        };
        let config =
            Config { imm, posted_receives, regions_written: e.regions_written, ..self.profile.config() };
        let opening = VerbsOpening::new(&self.nic.device, &config, e.geometry, window, &mut allocate);
        let opening = opening.expect("a queue pair of the simulated device");
        Opening::Verbs(Box::new(if self.plan.qps[qp].recovers { opening.recovering() } else { opening }))
    }

    /// Makes the endpoint of an end that has met the other. A sentence if what the other end handed over does not fit.
    pub(super) fn join(&mut self, qp: usize, end: usize, met: Met) -> Result<Endpoint, String> {
        let plan = &self.plan.qps[qp];
        let (e, q) = (&plan.ends[end], &mut self.qps[qp]);
        let (link, peer_geometry): (Box<dyn Link>, Geometry) = match met {
            Met::Local(met) if let Some(wires) = &q.wires => {
                let peer = met.peer.geometry;
                let (window, mirror) = (&q.memory[end].window, Mapped::heap(peer.window_bytes()));
                q.sides[end].inbound = mirror.address();
                let options = rails::Options {
                    rules: Rules { window_log: e.geometry.link_log, shortest: 64 },
                    peer_window_log: peer.link_log,
                    patience: PATIENCE,
                    recover: 10 * S,
                    peer_posts: plan.ends[1 - end].posts != Posts::Nothing,
                    ranks: [q.ranks[end], q.ranks[1 - end]],
                };
                let (memory, time) = ((window.into(), mirror), self.nodes[q.nodes[end]].time.clone());
                let rails = rails::join(wires, end, memory, e.regions_written, options, time);
                (Box::new(rails), peer)
            }
            Met::Local(met) => {
                let LocalMet { link, bell, peer, .. } = *met;
                let [own, theirs, window] =
                    [Mapped::from(link), Mapped::from(peer.link), Mapped::from(peer.window)];
                if window.bytes() < peer.geometry.window_bytes() {
                    return Err(format!("a window of {} bytes", window.bytes()));
                }
                memory::make_readable(own.address(), own.bytes());
                let side = &mut q.sides[end];
                side.link = Some(Words::writable(&own, abi::PUSHGATE_LINK_RECEIVED as usize, 4));
                side.inbound = window.address();
                (q.links[end], q.first_links[end]) = (Some(own.clone()), Some(own.clone()));
                if plan.is_kept() && self.plan.restarts(e.rank) {
                    let receives = (e.posts != Posts::Nothing).then_some(e.geometry.rx_log);
                    let kept = Kept::new(receives, &theirs, peer.geometry, &window, &bell, &peer.bell);
                    q.kept[end] = Some(kept);
                }
                let link = local_link(
                    q,
                    end,
                    e.geometry,
                    &own,
                    (&theirs, &peer.geometry),
                    window,
                    (bell, peer.bell),
                );
                (link, peer.geometry)
            }
            Met::Verbs(met) => {
                q.numbers[end] = met.link.number();
                q.inboxes[end] = Some(met.link.inbox());
                q.sides[end].inbound = met.mirror.as_ptr().as_ptr() as usize;
                (Box::new(met.link), met.peer_geometry)
            }
            Met::Tcp(met) => {
                q.sides[end].inbound = met.mirror.as_ptr().as_ptr() as usize;
                (Box::new(met.link), met.peer_geometry)
            }
            Met::Rails(mut met) => {
                met.shortest = 64;
                q.sides[end].inbound = met.mirror.as_ptr().as_ptr() as usize;
                let geometry = met.peer_geometry;
                let (own, peer) = self.incarnations(qp, end);
                let q = &self.qps[qp];
                let mailbox = q.mailboxes[end].clone();
                let channel = RailFrames { own, peer, mailbox, send: self.way(qp, end) };
                let recover = Duration::from_secs(10);
                (Box::new(met.join(channel, recover, 1)), geometry)
            }
        };
        let mut endpoint = self.endpoint_over(qp, end, link, peer_geometry);
        let regions = self.regions(qp, end);
        self.qps[qp].keys[end] =
            regions.map(|(memory, bytes)| endpoint.add_region(memory, bytes).expect("few regions"));
        Ok(endpoint)
    }

    /// The endpoint of an end over a link, without regions.
    pub(crate) fn endpoint_over(
        &self,
        qp: usize,
        end: usize,
        link: Box<dyn Link>,
        peer_geometry: Geometry,
    ) -> Endpoint {
        let (e, q) = (&self.plan.qps[qp].ends[end], &self.qps[qp]);
        let options = QpOptions {
            peer: q.ranks[1 - end],
            roles: false,
            posted_receives: e.posts != Posts::Nothing,
            reader_flushes: false,
            stuck_ns: STUCK,
            in_place_share: e.in_place_share,
            slow_ns: e.slow_ns,
            ungated: false,
            key_seed: q.key_seeds[end],
        };
        let local = q.carrier == Carrier::Local;
        let controls = [end, 1 - end].map(|end| q.controls[end].clone());
        let (link, m) = (Box::new(Flaky::new(link, controls, !local)), &q.memory[end]);
        let endpoint = Endpoint::new(&m.work, &m.control, e.geometry, peer_geometry, link, options);
        let told = self.broken.clone();
        let tell =
            Box::new(move |status| told.lock().unwrap_or_else(|e| e.into_inner()).push((qp, end, status)));
        let mut endpoint = endpoint.expect("an endpoint of the simulation").with_broken(tell);
        if e.copies {
            endpoint = endpoint.with_inbound_copied();
        }
        endpoint
    }

    /// An end's regions and their bytes: the one that the peer puts to, the buffers, the one that messages go out of.
    pub(crate) fn regions(&self, qp: usize, end: usize) -> [(RegionMemory, u64); 3] {
        let (e, q) = (&self.plan.qps[qp].ends[end], &self.qps[qp]);
        let region = |memory: &Guarded, device: bool| match device {
            true => RegionMemory::Device { address: memory.address() as u64, exported: None },
            false => RegionMemory::Host { address: memory.address(), keep: None },
        };
        let ([put, buffers], source) = (&q.regions[end], &self.programs[2 * qp + end].source);
        let all = [(put, e.device), (buffers, e.device), (source, false)];
        all.map(|(memory, device)| (region(memory, device), memory.bytes() as u64))
    }
}

/// A link over `local` of an end, over its segment `own` and the peer's memory.
pub(crate) fn local_link(
    q: &Qp,
    end: usize,
    geometry: Geometry,
    own: &Mapped,
    (theirs, peer_geometry): (&Mapped, &Geometry),
    window: Mapped,
    bells: (Option<Bell>, Option<Ringer>),
) -> Box<dyn Link> {
    let processes = Processes { peer: Some(Box::new(SimulatedProcess)), in_program: true };
    let bells = (bells.0, bells.1.map(Ringer::into_ring));
    let link = LocalLink::new(own, &geometry, theirs, peer_geometry, window, bells, processes);
    let control = q.controls[end].clone();
    Box::new(link.with_segments(Box::new(move |bytes| {
        let memory = Arc::new(allocate("link", bytes)?);
        memory::make_readable(memory.as_ptr().as_ptr() as usize, bytes);
        control.segments.lock().unwrap_or_else(|e| e.into_inner()).push(memory.clone());
        Ok(memory)
    })))
}
