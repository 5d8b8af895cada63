//! One thread of a replay: it posts, tests the oldest request of each of its ends in turn, and yields when nothing moved, as NCCL's
//! proxy thread does. A post waits until all requests are done that the recorded thread had seen done before it.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use pushgate_net_caller::table::Ptr;
use pushgate_net_trace::Role;

use super::figures::Latencies;
use super::memory::Memory;
use super::plugin::Calls;
use super::script::{EndPlan, Step};
use super::sockets::Sockets;

/// What carries the messages.
pub enum Way {
    Plugin(Calls),
    Sockets(Sockets),
}

/// What all threads of a replay share.
pub struct Replay<'a> {
    pub way: &'a Way,
    pub ends: &'a [EndPlan],
    pub memories: &'a [Memory],
    /// Gaps between calls of a thread are kept.
    pub paced: bool,
    /// All bytes of messages are compared.
    pub all: bool,
    /// Time in which nothing moves, after which the replay fails.
    pub silence: Duration,
    /// A thread has failed.
    pub over: AtomicBool,
}

/// What a thread measured.
#[derive(Default)]
pub struct Ran {
    pub first: Option<Instant>,
    pub last: Option<Instant>,
    pub received: u64,
    pub latencies: Latencies,
}

/// An end in use.
struct Active {
    end: usize,
    /// The next of the end's `order` that is to be done.
    next: usize,
    /// Requests under way: the post, when it was made, the plugin's request.
    under_way: Vec<(usize, Instant, Ptr)>,
    done: HashSet<usize>,
}

impl Replay<'_> {
    pub fn run(&self, steps: &[Step]) -> Result<Ran> {
        let ran = self.steps(steps);
        if ran.is_err() {
            self.over.store(true, Ordering::Relaxed);
        }
        ran
    }

    fn steps(&self, steps: &[Step]) -> Result<Ran> {
        let mut ran = Ran::default();
        let mut active: Vec<Active> = Vec::new();
        for step in steps {
            if !active.iter().any(|a| a.end == step.end) {
                let end = step.end;
                active.push(Active { end, next: 0, under_way: Vec::new(), done: HashSet::new() });
            }
        }
        let place: std::collections::HashMap<usize, usize> =
            active.iter().enumerate().map(|(i, a)| (a.end, i)).collect();
        let mut cursor = 0;
        let mut moved_at = Instant::now();
        // When the step before the cursor's was passed, in the recording and here.
        let mut before = (steps.first().map_or(0, |step| step.time), moved_at);
        loop {
            let mut moved = false;
            while let Some(step) = steps.get(cursor) {
                let a = &mut active[place[&step.end]];
                let passed = match step.done {
                    true => a.done.contains(&step.post),
                    false => self.is_due(step, before) && self.post(a, step.post, &mut ran)?,
                };
                if !passed {
                    break;
                }
                before = (step.time, Instant::now());
                cursor += 1;
                moved = true;
            }
            for a in active.iter_mut().filter(|a| !a.under_way.is_empty()) {
                moved |= self.test(a, &mut ran)?;
            }
            if moved {
                moved_at = Instant::now();
                continue;
            }
            if cursor == steps.len() && active.iter().all(|a| a.under_way.is_empty()) {
                return Ok(ran);
            }
            if self.over.load(Ordering::Relaxed) {
                bail!("another thread failed");
            }
            // A gap that is waited for is no silence.
            let gap = steps.get(cursor).map_or(0, |step| step.time.saturating_sub(before.0));
            let silence = self.silence + if self.paced { Duration::from_nanos(gap) } else { Duration::ZERO };
            if moved_at.elapsed() > silence {
                let waits: Vec<_> =
                    active.iter().filter(|a| !a.under_way.is_empty()).take(4).map(waits_for).collect();
                bail!(
                    "nothing moved for {} s at step {cursor} of {}; {}",
                    silence.as_secs_f32(),
                    steps.len(),
                    waits.join(", ")
                );
            }
            std::thread::yield_now();
        }
    }

    fn is_due(&self, step: &Step, (recorded, here): (u64, Instant)) -> bool {
        !self.paced || here.elapsed() >= Duration::from_nanos(step.time.saturating_sub(recorded))
    }

    /// Posts; false if there is no room yet.
    fn post(&self, a: &mut Active, number: usize, ran: &mut Ran) -> Result<bool> {
        let (plan, memory) = (&self.ends[a.end], &self.memories[a.end]);
        let post = &plan.posts[number];
        if plan.role == Role::Receive {
            post.parts.iter().for_each(|part| memory.spoil(part.offset, part.size));
        }
        let now = Instant::now();
        let request = match self.way {
            Way::Plugin(calls) => match calls.post(a.end, plan.role, post, memory)? {
                Some(request) => request,
                None => return Ok(false),
            },
            Way::Sockets(sockets) => {
                sockets.post(a.end, number);
                std::ptr::null_mut()
            }
        };
        ran.first.get_or_insert(now);
        a.under_way.push((number, now, request));
        Ok(true)
    }

    /// Tests the request of an end that was done next in the recording. Another may not be done before it.
    fn test(&self, a: &mut Active, ran: &mut Ran) -> Result<bool> {
        let (plan, memory) = (&self.ends[a.end], &self.memories[a.end]);
        let number = plan.order[a.next];
        let Some(at) = a.under_way.iter().position(|(post, ..)| *post == number) else { return Ok(false) };
        let (_, begun, request) = a.under_way[at];
        let sizes = match self.way {
            Way::Plugin(calls) => calls.test(plan.role, request)?,
            Way::Sockets(sockets) => sockets.test(a.end, number)?.then_some([-1; 8]),
        };
        let Some(sizes) = sizes else { return Ok(false) };
        let now = Instant::now();
        ran.last = Some(now);
        a.under_way.remove(at);
        a.next += 1;
        a.done.insert(number);
        let parts = &plan.posts[number].parts;
        let bytes = parts.iter().map(|part| part.size).sum();
        ran.latencies.add(plan.role, bytes, now.duration_since(begun).as_nanos() as u64);
        if plan.role == Role::Receive {
            for (part, size) in parts.iter().zip(sizes) {
                if size >= 0 && size as usize != part.size {
                    bail!("message {} has {size} bytes, expected {}", part.message, part.size);
                }
                if let Some(byte) = memory.differs(part.offset, part.size, part.from, self.all) {
                    bail!("message {} of {} bytes: byte {byte} is wrong", part.message, part.size);
                }
                ran.received += part.size as u64;
            }
        }
        Ok(true)
    }
}

fn waits_for(a: &Active) -> String {
    let posts: Vec<_> = a.under_way.iter().map(|(post, ..)| post.to_string()).collect();
    format!("end {} waits for posts {}", a.end, posts.join(" "))
}
