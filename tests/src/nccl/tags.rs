//! Receives of several buffers, told apart by tags: used by ranks that share a connection (PXN).
//!
//! A message whose receive is not posted must not hold up messages whose receives are.

use std::time::Instant;

use super::pair::{Buffer, Ends, Random};
use super::scenario::{Options, begin, close, loopback, over_tcp};
use super::table::{Plugin, Ptr, warnings};
use crate::hang;

/// How often a post that must not be accepted is tried.
const LOOKS: usize = 300;
/// How many groups of [`shared`] have their receives posted at once.
const AHEAD: usize = 3;

/// A connection of a rank to itself, with memory for every message of a scenario: message `i` is
/// sent from place `i` and received at place `i`.
struct Shared<'a> {
    plugin: &'a Plugin,
    ends: Ends,
    out: Buffer,
    into: Buffer,
    registrations: [Ptr; 2],
    stride: usize,
}

/// Messages, by place, whose requests are not done.
type Sent = Vec<(usize, Ptr)>;

/// A receive that is not done: the places of its buffers.
struct Group {
    request: Ptr,
    places: Vec<usize>,
}

impl<'a> Shared<'a> {
    fn new(plugin: &'a Plugin, ctx: Ptr, places: usize, stride: usize) -> Self {
        let ends = loopback(plugin, ctx);
        let [out, into] = [Buffer::new(places * stride), Buffer::new(places * stride)];
        let registrations = [(ends.send, &out), (ends.recv, &into)]
            .map(|(comm, buffer)| plugin.reg_mr(comm, buffer.at(0), buffer.bytes()).expect("regMr"));
        for place in 0..places {
            out.fill(place * stride, stride, place as u64);
        }
        into.set(0, into.bytes(), 0xee);
        Shared { plugin, ends, out, into, registrations, stride }
    }

    /// Sends message `place` if the plugin accepts it now.
    fn send(&self, place: usize, size: usize, tag: usize) -> Option<Ptr> {
        let at = self.out.at(place * self.stride);
        // SAFETY: the buffer stays until the connection is closed.
        let sent = unsafe { self.plugin.isend(self.ends.send, at, size, tag as i32, self.registrations[0]) };
        sent.unwrap_or_else(|e| panic!("{e}; the plugin says: {:#?}", warnings()))
    }

    /// Posts a receive with one buffer for each tag from 0 on, if the plugin accepts it now.
    fn receive(&self, places: &[usize]) -> Option<Group> {
        let n = places.len();
        let data: Vec<Ptr> = places.iter().map(|place| self.into.at(place * self.stride)).collect();
        let tags: Vec<i32> = (0..n as i32).collect();
        let (sizes, mrs) = (vec![self.stride; n], vec![self.registrations[1]; n]);
        // SAFETY: nothing else uses these places.
        let posted = unsafe { self.plugin.irecv(self.ends.recv, &data, &sizes, &tags, &mrs) };
        let request = posted.unwrap_or_else(|e| panic!("{e}; the plugin says: {:#?}", warnings()))?;
        Some(Group { request, places: places.to_vec() })
    }

    /// Tests the oldest receive and all sends. True if any is done.
    fn test(&self, groups: &mut Vec<Group>, sent: &mut Sent, size: impl Fn(usize) -> usize) -> bool {
        let before = (groups.len(), sent.len());
        let failed = |e| -> ! { panic!("{e}; the plugin says: {:#?}", warnings()) };
        sent.retain(|(_, request)| {
            // SAFETY: our own request, not done yet.
            let done = unsafe { self.plugin.test_send(*request, true) };
            !done.unwrap_or_else(|e| failed(e))
        });
        if let Some(group) = groups.first() {
            // SAFETY: our own request, not done yet.
            let done = unsafe { self.plugin.test_receive(group.request, true) };
            if let Some(sizes) = done.unwrap_or_else(|e| failed(e)) {
                for (tag, place) in group.places.iter().enumerate() {
                    assert_eq!(sizes[tag] as usize, size(*place), "size of message {place}, tag {tag}");
                    let wrong = self.into.differs(place * self.stride, size(*place), *place as u64);
                    assert_eq!(wrong, None, "message {place}, tag {tag}");
                }
                groups.remove(0);
            }
        }
        before != (groups.len(), sent.len())
    }

    fn end(self) {
        self.plugin.dereg_mr(self.ends.send, self.registrations[0]).expect("deregMr");
        self.plugin.dereg_mr(self.ends.recv, self.registrations[1]).expect("deregMr");
        close(self.plugin, self.ends);
    }
}

/// One message is sent too early. Receives of all tags are posted as a group. All messages but that
/// of the last tag are sent, then a second message of tag 1, whose receive comes with the next
/// group. The second message is not accepted, so the last tag's message arrives; the second one
/// arrives with the next group.
fn one_that_is_early(o: &Options, plugin: &Plugin, ctx: Ptr, tags: usize, size: usize) {
    let shared = Shared::new(plugin, ctx, 2 * tags, size);
    let (mut groups, mut sent) = (Vec::new(), Sent::new());
    let places = |group: usize| (group * tags..(group + 1) * tags).collect::<Vec<_>>();
    groups.push(shared.receive(&places(0)).expect("room for a receive"));
    let until_sent = |place: usize, groups: &mut Vec<Group>, sent: &mut Sent| {
        let begin = Instant::now();
        let request = loop {
            match shared.send(place, size, place % tags) {
                Some(request) => break request,
                None => _ = shared.test(groups, sent, |_| size),
            }
            assert!(begin.elapsed() < hang(), "message {place}, whose receive is posted, is never taken");
            std::thread::yield_now();
        };
        sent.push((place, request));
    };
    for place in 0..tags - 1 {
        until_sent(place, &mut groups, &mut sent);
    }
    let early = tags + 1;
    let mut taken = None;
    for _ in 0..LOOKS {
        taken = taken.or_else(|| shared.send(early, size, 1));
        shared.test(&mut groups, &mut sent, |_| size);
        std::thread::yield_now();
    }
    o.promise("a message whose receive is not posted is not taken", taken.is_none(), &taken);
    sent.extend(taken.map(|request| (early, request)));
    until_sent(tags - 1, &mut groups, &mut sent);
    let begin = Instant::now();
    while !groups.is_empty() {
        shared.test(&mut groups, &mut sent, |_| size);
        assert!(
            begin.elapsed() < hang(),
            "the first group is not done: a message of the next one is before it"
        );
        std::thread::yield_now();
    }
    groups.push(shared.receive(&places(1)).expect("room for a receive"));
    for place in (tags..2 * tags).filter(|place| *place != early || taken.is_none()) {
        until_sent(place, &mut groups, &mut sent);
    }
    while !(groups.is_empty() && sent.is_empty()) {
        shared.test(&mut groups, &mut sent, |_| size);
        assert!(begin.elapsed() < hang(), "the second group is not done");
        std::thread::yield_now();
    }
    shared.end();
}

/// Users of one connection, each with a tag and a pace of its own; each group of receives has one
/// buffer for each user.
fn shared(o: &Options, plugin: &Plugin, ctx: Ptr, tags: usize) {
    let mut r = Random(o.seed);
    let places = o.groups * tags;
    let stride = o.max.min(100_000);
    let sizes: Vec<usize> = (0..places)
        .map(|_| match r.below(10) {
            0 => 0,
            1..4 => 1 + r.below(40),
            4 => stride,
            _ => 1 + r.below(stride / 4),
        })
        .collect();
    let shared = Shared::new(plugin, ctx, places, stride);
    let (mut groups, mut sent) = (Vec::new(), Sent::new());
    // What each user has sent, and which user is eager now.
    let mut next = vec![0; tags];
    let (mut posted, mut eager, mut last) = (0, 0, Instant::now());
    while posted < o.groups || !groups.is_empty() || !sent.is_empty() || next.iter().any(|n| *n < o.groups) {
        let mut any = false;
        if posted < o.groups && groups.len() < AHEAD && r.below(3) == 0 {
            let places: Vec<usize> = (0..tags).map(|tag| posted * tags + tag).collect();
            if let Some(group) = shared.receive(&places) {
                groups.push(group);
                (posted, any) = (posted + 1, true);
            }
        }
        if r.below(20) == 0 {
            eager = r.below(tags);
        }
        let user = if r.below(2) == 0 { eager } else { r.below(tags) };
        if next[user] < o.groups {
            let place = next[user] * tags + user;
            if let Some(request) = shared.send(place, sizes[place], user) {
                sent.push((place, request));
                (next[user], any) = (next[user] + 1, true);
            }
        }
        any |= shared.test(&mut groups, &mut sent, |place| sizes[place]);
        if any {
            last = Instant::now();
        } else {
            let left = (posted, groups.len(), sent.len(), &next);
            assert!(last.elapsed() < hang(), "no progress within a long time: {left:?}");
            std::thread::yield_now();
        }
    }
    shared.end();
}

/// Messages of several tags on one connection: no message holds up another.
pub fn tags(o: &Options) {
    let plugin = o.open();
    let ctx = begin(&plugin);
    let most = plugin.properties(0).expect("properties").max_recvs;
    if most < 2 {
        assert!(o.nccl_rules || over_tcp(), "{most} buffers in a receive");
        println!("left out: the plugin takes {most} buffer in a receive, so no two tags share a connection");
        return;
    }
    let most = most.min(8) as usize;
    // Sizes that travel in the WQE, in the window or a region, and in slices.
    for size in [30, 60_000, o.max] {
        one_that_is_early(o, &plugin, ctx, most, size);
    }
    shared(o, &plugin, ctx, most);
    plugin.finalize(ctx).expect("finalize");
    println!("{most} tags, {} groups: none held up another", o.groups);
}
