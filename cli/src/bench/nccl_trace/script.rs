//! What a replay does: the recorded calls as steps of threads, and what each step waits for.
//!
//! A message is replayed if both of its ends are in the folder. The k-th send of a tag goes into the k-th buffer that was
//! posted for the tag, as the plugin pairs them.

use std::collections::{BTreeMap, HashMap, VecDeque};

use anyhow::{Result, bail};
use pushgate_net_trace::{Buffer, End, Role, What};

/// A replay of all processes.
#[derive(Debug)]
pub struct Script {
    pub processes: Vec<Process>,
    /// Ends whose other end is not in the folder.
    pub lone: usize,
    /// Posts without their other side.
    pub unmatched: usize,
    /// Ends whose trace has no record of their close.
    pub unclosed: usize,
}

/// What one recorded process does.
#[derive(Debug)]
pub struct Process {
    pub pid: u32,
    pub ends: Vec<EndPlan>,
    /// The steps of each thread, in the order of the recording.
    pub threads: Vec<Vec<Step>>,
    /// Nanoseconds from the first post to the end of the last request.
    pub span: u64,
}

/// One end of a connection.
#[derive(Debug)]
pub struct EndPlan {
    pub connection: usize,
    pub role: Role,
    pub device: u32,
    /// Bytes of memory.
    pub memory: usize,
    /// Stretches of the memory, and whether a post named a registration there.
    pub regions: Vec<Region>,
    pub posts: Vec<Post>,
    /// The posts in the order in which they were done.
    pub order: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    pub offset: usize,
    pub bytes: usize,
    pub registered: bool,
}

/// A send or a receive.
#[derive(Debug)]
pub struct Post {
    pub parts: Vec<Part>,
    /// Nanoseconds from the post to its end, if the recording has the end.
    pub recorded: Option<u64>,
}

/// A message, or a receive's buffer for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Where the buffer lies in the end's memory.
    pub offset: usize,
    /// Bytes of the buffer.
    pub room: usize,
    /// Bytes of the message.
    pub size: usize,
    pub tag: u32,
    /// Where the message lies in the sending end's memory.
    pub from: usize,
    /// The number of the message among those of the connection, in the order in which they are sent.
    pub message: usize,
    pub registered: bool,
}

/// A step of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub end: usize,
    pub post: usize,
    /// Wait for the end of the post, or post.
    pub done: bool,
    /// When the call returned in the recording, in nanoseconds; of a post that was refused at first, the call that was taken: meanwhile
    /// its thread went on.
    pub time: u64,
}

/// The posts of an end that is being read, with their times.
struct Posts {
    all: Vec<(u64, Vec<Buffer>)>,
    /// When each was taken.
    taken: Vec<u64>,
    /// When each ended: time of the call and its return.
    ends: Vec<Option<(u64, u64)>>,
    /// The other side of each buffer: a post and its buffer.
    other: Vec<Vec<Option<(usize, usize)>>>,
    /// By the request's number; none for a flush.
    by_request: HashMap<u32, usize>,
    thread: u16,
}

impl Posts {
    fn of(end: &End) -> Posts {
        let mut posts = empty();
        for event in &end.events {
            match &event.what {
                What::Post { request, buffers, .. } => {
                    if posts.all.is_empty() {
                        posts.thread = event.thread;
                    }
                    posts.by_request.insert(*request, posts.all.len());
                    posts.all.push((event.time, buffers.clone()));
                    posts.taken.push(event.time.saturating_add(event.took.into()));
                    posts.ends.push(None);
                    posts.other.push(vec![None; buffers.len()]);
                }
                What::Done { request, .. } => {
                    if let Some(&post) = posts.by_request.get(request) {
                        posts.ends[post] = Some((event.time, event.time.saturating_add(event.took.into())));
                    }
                }
                _ => {}
            }
        }
        posts
    }

    fn kept(&self, post: usize) -> bool {
        self.other[post].iter().all(Option::is_some)
    }
}

/// Pairs the messages of a connection: of sends and receives.
fn pair(sends: &mut Posts, receives: &mut Posts) -> Result<()> {
    let mut waiting: HashMap<u32, VecDeque<usize>> = HashMap::new();
    for (post, (_, buffers)) in sends.all.iter().enumerate() {
        waiting.entry(buffers[0].tag).or_default().push_back(post);
    }
    for (post, (_, buffers)) in receives.all.iter().enumerate() {
        let found: Vec<_> =
            buffers.iter().map(|b| waiting.get_mut(&b.tag).and_then(VecDeque::pop_front)).collect();
        // A receive that lacks a message is left out, with its other messages.
        if found.iter().any(Option::is_none) {
            continue;
        }
        for (i, send) in found.into_iter().flatten().enumerate() {
            let (size, room) = (sends.all[send].1[0].size, buffers[i].size);
            if size > room {
                bail!("a message of {size} bytes was sent into a receive of {room} bytes");
            }
            receives.other[post][i] = Some((send, 0));
            sends.other[send][0] = Some((post, i));
        }
    }
    Ok(())
}

/// Where stretches of recorded memory lie in an end's own memory.
struct Layout {
    /// Address, end, offset, registered.
    stretches: Vec<(u64, u64, usize, bool)>,
    bytes: usize,
}

impl Layout {
    /// Of all buffers of these posts; those that touch each other keep their distance.
    fn of<'a>(buffers: impl Iterator<Item = &'a Buffer>) -> Result<Layout> {
        let mut all: Vec<_> = buffers.map(|b| (b.address, b.address + b.size, b.registered)).collect();
        all.sort_unstable();
        let mut merged: Vec<(u64, u64, bool)> = Vec::new();
        for (from, to, registered) in all {
            match merged.last_mut() {
                Some(last) if from <= last.1 => *last = (last.0, last.1.max(to), last.2 || registered),
                _ => merged.push((from, to, registered)),
            }
        }
        let (mut stretches, mut bytes) = (Vec::new(), 0usize);
        for (from, to, registered) in merged {
            // As in the recording relative to the cache's lines.
            let offset = bytes + (from % 64) as usize;
            stretches.push((from, to, offset, registered));
            let next = usize::try_from((to - from).max(1)).ok().and_then(|length| offset.checked_add(length));
            let next = next.and_then(|next| next.checked_next_multiple_of(4096));
            let Some(next) = next.filter(|next| *next <= isize::MAX as usize / 2) else {
                bail!("buffers of {} bytes", to - from)
            };
            bytes = next;
        }
        Ok(Layout { stretches, bytes })
    }

    fn offset(&self, b: &Buffer) -> usize {
        let at = self.stretches.partition_point(|(from, ..)| *from <= b.address) - 1;
        let (from, _, offset, _) = self.stretches[at];
        offset + (b.address - from) as usize
    }

    fn regions(&self) -> Vec<Region> {
        let region = |&(from, to, offset, registered): &(u64, u64, usize, bool)| Region {
            offset,
            // Where all messages are empty there is something to register too.
            bytes: (to - from).max(1) as usize,
            registered,
        };
        self.stretches.iter().map(region).collect()
    }
}

impl Script {
    /// The replay of these ends.
    pub fn of(ends: &[End]) -> Result<Script> {
        let mut connections: BTreeMap<[u8; 16], [Option<usize>; 2]> = BTreeMap::new();
        for (number, end) in ends.iter().enumerate() {
            let side = usize::from(end.header.role == Role::Receive);
            let place = &mut connections.entry(end.header.connection).or_default()[side];
            if place.replace(number).is_some() {
                bail!(
                    "two {:?} ends of one connection (pid {}): are there traces of two runs?",
                    end.header.role,
                    end.header.pid
                );
            }
        }
        let mut posts: Vec<Posts> = ends.iter().map(Posts::of).collect();
        let mut connection_of = vec![None; ends.len()];
        let whole = connections.values().filter_map(|sides| Some((sides[0]?, sides[1]?)));
        for (connection, (send, receive)) in whole.enumerate() {
            (connection_of[send], connection_of[receive]) = (Some(connection), Some(connection));
            // Each is one of the two, so they can't be borrowed by one call.
            let mut sends = std::mem::replace(&mut posts[send], empty());
            let paired = pair(&mut sends, &mut posts[receive]);
            posts[send] = sends;
            paired.map_err(|e| {
                e.context(format!("pids {} and {}", ends[send].header.pid, ends[receive].header.pid))
            })?;
        }
        let layouts: Vec<Layout> = posts
            .iter()
            .map(|p| {
                Layout::of(p.all.iter().enumerate().filter(|(i, _)| p.kept(*i)).flat_map(|(_, (_, b))| b))
            })
            .collect::<Result<_>>()?;
        let other_end: HashMap<usize, usize> = connections
            .values()
            .filter_map(|sides| Some((sides[0]?, sides[1]?)))
            .flat_map(|(send, receive)| [(send, receive), (receive, send)])
            .collect();
        let mut script = Script {
            processes: Vec::new(),
            lone: connection_of.iter().filter(|c| c.is_none()).count(),
            unmatched: posts.iter().map(|p| (0..p.all.len()).filter(|i| !p.kept(*i)).count()).sum(),
            unclosed: ends
                .iter()
                .filter(|end| !end.events.iter().any(|e| matches!(e.what, What::Closed { .. })))
                .count(),
        };
        // The number of each send among those that are replayed.
        let messages: HashMap<usize, Vec<usize>> = (0..ends.len())
            .map(|number| {
                let p = &posts[number];
                let counted = (0..p.all.len()).scan(0, |next, post| {
                    let number = *next;
                    *next += usize::from(p.kept(post));
                    Some(number)
                });
                (number, counted.collect())
            })
            .collect();
        let mut of_process: BTreeMap<[u8; 16], Vec<usize>> = BTreeMap::new();
        for (number, end) in ends.iter().enumerate().filter(|(number, _)| connection_of[*number].is_some()) {
            of_process.entry(end.header.process).or_default().push(number);
        }
        for numbers in of_process.into_values() {
            let mut process =
                Process { pid: ends[numbers[0]].header.pid, ends: Vec::new(), threads: Vec::new(), span: 0 };
            let mut steps: BTreeMap<u16, Vec<Step>> = BTreeMap::new();
            for number in numbers {
                let (end, p) = (&ends[number], &posts[number]);
                let other = other_end[&number];
                let kept: Vec<usize> = (0..p.all.len()).filter(|post| p.kept(*post)).collect();
                let thread = steps.entry(p.thread).or_default();
                let mut order: Vec<(u64, usize)> = Vec::new();
                let mut plans = Vec::new();
                for (index, &post) in kept.iter().enumerate() {
                    let (time, buffers) = &p.all[post];
                    let step =
                        Step { end: process.ends.len(), post: index, done: false, time: p.taken[post] };
                    thread.push(step);
                    if let Some((_, returned)) = p.ends[post] {
                        thread.push(Step { done: true, time: returned, ..step });
                    }
                    order.push((p.ends[post].map_or(u64::MAX, |(done, _)| done), index));
                    let part = |(i, b): (usize, &Buffer)| {
                        let (their, slot) = p.other[post][i].expect("it is kept");
                        let (send, buffer, ours) = match end.header.role {
                            Role::Send => (post, b, number),
                            Role::Receive => (their, &posts[other].all[their].1[slot], other),
                        };
                        Part {
                            offset: layouts[number].offset(b),
                            room: b.size as usize,
                            size: buffer.size as usize,
                            tag: b.tag,
                            from: layouts[ours].offset(buffer),
                            message: messages[&ours][send],
                            registered: b.registered,
                        }
                    };
                    plans.push(Post {
                        parts: buffers.iter().enumerate().map(part).collect(),
                        recorded: p.ends[post].map(|(_, returned)| returned.saturating_sub(*time)),
                    });
                }
                order.sort_unstable();
                process.ends.push(EndPlan {
                    connection: connection_of[number].expect("it is of one"),
                    role: end.header.role,
                    device: end.header.device,
                    memory: layouts[number].bytes,
                    regions: layouts[number].regions(),
                    posts: plans,
                    order: order.into_iter().map(|(_, post)| post).collect(),
                });
            }
            process.threads = steps.into_values().filter(|steps| !steps.is_empty()).collect();
            for steps in &mut process.threads {
                steps.sort_by_key(|step| step.time);
            }
            let times = || process.threads.iter().flatten().map(|step| step.time);
            process.span = times().max().unwrap_or(0) - times().min().unwrap_or(0);
            script.processes.push(process);
        }
        if script.processes.iter().all(|p| p.threads.is_empty()) {
            bail!("no message has both of its ends there: record all processes of a job into the folder");
        }
        Ok(script)
    }
}

fn empty() -> Posts {
    Posts {
        all: Vec::new(),
        taken: Vec::new(),
        ends: Vec::new(),
        other: Vec::new(),
        by_request: HashMap::new(),
        thread: 0,
    }
}

#[cfg(test)]
mod tests {
    use pushgate_net_trace::ring::Ring;

    use super::*;

    const RING: Ring = Ring { hosts: 2, gpus: 2, channels: 8, bytes: 256 << 10, rounds: 1 };

    #[test]
    fn a_ring_of_two_hosts_of_two_becomes_a_script_of_four_processes() {
        let script = Script::of(&RING.ends()).unwrap();
        assert_eq!((script.processes.len(), script.lone, script.unmatched, script.unclosed), (4, 0, 0, 0));
        for process in &script.processes {
            assert_eq!((process.ends.len(), process.threads.len()), (8, 1));
            let steps = &process.threads[0];
            // Six steps of the ring in each channel, a post and its end each.
            assert_eq!(steps.len(), 8 * 6 * 2);
            assert!(steps.is_sorted_by_key(|step| step.time));
            for end in &process.ends {
                assert_eq!(end.order, (0..6).collect::<Vec<_>>());
                assert!(end.posts.iter().all(|post| post.parts[0].size == 8 << 10));
                let messages: Vec<_> = end.posts.iter().map(|post| post.parts[0].message).collect();
                assert_eq!(messages, (0..6).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn p8_calls_that_last_beyond_the_end_of_the_clock_are_a_script_too() {
        let mut ends = Ring { gpus: 1, channels: 1, ..RING }.ends();
        for event in ends.iter_mut().flat_map(|end| &mut end.events) {
            (event.time, event.took) = (u64::MAX, 1);
        }
        assert_eq!(Script::of(&ends).unwrap().processes.len(), 2);
    }

    #[test]
    fn a_send_waits_for_what_the_thread_had_received_before_it() {
        let script = Script::of(&Ring { gpus: 1, channels: 1, ..RING }.ends()).unwrap();
        for process in &script.processes {
            let role = |step: &Step| process.ends[step.end].role;
            let steps = &process.threads[0];
            for post in steps.iter().filter(|s| role(s) == Role::Send && !s.done && s.post > 0) {
                let before = steps.iter().take_while(|s| *s != post);
                let received = before.filter(|s| role(s) == Role::Receive && s.done).count();
                assert_eq!(received, post.post);
            }
        }
    }

    #[test]
    fn what_has_no_other_side_is_left_out_and_counted() {
        let mut ends = RING.ends();
        let lone = ends.pop().unwrap();
        let script = Script::of(&ends).unwrap();
        assert_eq!((script.lone, script.unmatched), (1, 6));
        ends.push(lone);
        // A trace that ends early, as of a killed program: its last two messages are not there.
        let end = &mut ends[0];
        let posts: Vec<_> =
            end.events.iter().filter(|e| matches!(e.what, What::Post { .. })).map(|e| e.time).collect();
        end.events.retain(|e| e.time < posts[4]);
        let script = Script::of(&ends).unwrap();
        assert_eq!((script.lone, script.unmatched, script.unclosed), (0, 2, 1));
        let all: usize = script.processes.iter().flat_map(|p| &p.ends).map(|end| end.posts.len()).sum();
        assert_eq!(all, 2 * (16 * 6 - 2));
    }

    #[test]
    fn a_post_that_was_refused_at_first_is_made_when_it_was_taken() {
        let mut ends = Ring { gpus: 1, channels: 1, rounds: 1, ..RING }.ends();
        let steps = |ends: &[End]| {
            Script::of(ends).unwrap().processes.into_iter().map(|p| p.threads).collect::<Vec<_>>()
        };
        let taken = steps(&ends);
        let sends = ends.iter_mut().find(|e| e.header.role == Role::Send).unwrap();
        let post = sends.events.iter_mut().rfind(|e| matches!(e.what, What::Post { .. })).unwrap();
        // Its first call was before all others.
        post.took += post.time as u32;
        post.time = 0;
        assert_eq!(steps(&ends), taken);
    }

    #[test]
    fn messages_go_into_the_buffers_of_their_tag_in_order() {
        let mut ends = Ring { gpus: 1, channels: 1, hosts: 2, bytes: 64, rounds: 1 }.ends();
        // The first connection: sends of tags 1, 0, and a receive of both.
        let [send, receive] = [Role::Send, Role::Receive].map(|role| {
            let connection = ends[0].header.connection;
            ends.iter().position(|e| e.header.role == role && e.header.connection == connection).unwrap()
        });
        let buffer = |tag, address, size| Buffer { address, size, tag, registered: true };
        let event = |time, what| pushgate_net_trace::Event { time, took: 0, thread: 0, what };
        let post = |request, buffers| What::Post { request, refused: 0, buffers };
        ends[send].events =
            vec![event(1, post(0, vec![buffer(1, 4096, 10)])), event(2, post(1, vec![buffer(0, 8192, 20)]))];
        ends[receive].events = vec![event(1, post(0, vec![buffer(0, 4096, 30), buffer(1, 9000, 40)]))];
        let script = Script::of(&ends).unwrap();
        let receive = script
            .processes
            .iter()
            .flat_map(|p| &p.ends)
            .find(|e| e.role == Role::Receive && e.posts.iter().any(|post| post.parts.len() == 2));
        let parts = &receive.unwrap().posts[0].parts;
        assert_eq!(
            parts.iter().map(|p| (p.size, p.room, p.message)).collect::<Vec<_>>(),
            [(20, 30, 1), (10, 40, 0)]
        );
        ends[send].events[1] = event(2, post(1, vec![buffer(0, 8192, 31)]));
        let said = format!("{:#}", Script::of(&ends).unwrap_err());
        assert!(said.contains("31 bytes was sent into a receive of 30"), "{said}");
    }

    #[test]
    fn traces_of_two_runs_that_name_one_connection_are_refused() {
        let mut ends = RING.ends();
        let mut again = ends[0].clone();
        again.header.process = [9; 16];
        ends.push(again);
        let said = Script::of(&ends).unwrap_err().to_string();
        assert!(said.contains("two runs"), "{said}");
    }
}
