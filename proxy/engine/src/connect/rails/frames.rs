//! The channel of rails: frames of a session that outlives each of its links.
//!
//! RESUME of a rail carries the offer of this end's next link, once that link is made; READY carries its places. An end whose
//! link is not made sends RESUME without an offer: the ends learn at once what the rail owes, the attempt fails, and a later
//! one has the offers of both.

use std::collections::VecDeque;

use pushgate_core::recovery::Control;
use pushgate_link::frame::Frame;
use pushgate_link::mailbox::{Mailbox, SendFrame};

use crate::connect::{self, Incarnation};
use crate::rails::Beside;

/// Where the frames about rails go, and where they come from.
pub struct RailFrames {
    /// This end's incarnation.
    pub own: Incarnation,
    /// The peer's incarnation that this end is live with.
    pub peer: Incarnation,
    /// The peer's frames.
    pub mailbox: Mailbox,
    /// The way of this end's frames.
    pub send: SendFrame,
}

/// Frames of a channel.
pub(super) struct Frames {
    channel: RailFrames,
    waiting: VecDeque<Frame>,
}

impl Frames {
    pub(super) fn new(channel: RailFrames) -> Self {
        Frames { channel, waiting: VecDeque::new() }
    }
}

impl Beside for Frames {
    fn send(&mut self, rail: usize, control: Control, body: &[u8]) {
        let RailFrames { own, peer, send, .. } = &mut self.channel;
        let bytes = connect::rail(*own, *peer, rail as u8, control, body);
        send(Frame { bytes, along: Default::default() });
    }

    fn receive(&mut self) -> Option<(usize, Control, Vec<u8>)> {
        if self.waiting.is_empty() {
            if self.channel.mailbox.is_empty() {
                return None;
            }
            self.waiting = self.channel.mailbox.take_all();
        }
        while let Some(frame) = self.waiting.pop_front() {
            // A peer of this session sends no other frame. The reader of the channel has looked at the sender.
            if let Some((rail, control, body)) = connect::of_rail(&frame.bytes) {
                return Some((rail as usize, control, body.to_vec()));
            }
        }
        None
    }

    // The queue pair's owner tells the peer over the same channel.
    fn set_status(&mut self, _word: u64) {}

    fn peer_status(&self) -> u64 {
        0
    }
}
