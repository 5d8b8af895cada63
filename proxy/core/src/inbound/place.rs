//! What is done with an accepted message: shown, put into a region or a buffer, copied, or kept waiting.

use pushgate_abi::abi;
use pushgate_abi::record::{Opcode, Record};

use super::{
    Action, Copying, Destination, Fault, Finish, Held, Inbound, Landed, Payload, Site, Stretch, device,
    in_buffer, peer,
};
use crate::landing::NoRoom;
use crate::refusal::{Lengths, Refusal};

impl Inbound {
    /// Decides on an accepted message. Whatever is answered but [`Action::Wait`] has been taken into account: the caller
    /// must do it, or end the queue pair.
    #[inline]
    pub fn place<S: Site>(
        &mut self,
        r: &Record,
        placed: bool,
        sequence: u64,
        site: &S,
    ) -> Result<Action, Fault> {
        let lands = match r.opcode {
            Opcode::Put => true,
            Opcode::Send => self.rules.posted_receives,
            _ => false,
        };
        if placed && !lands {
            return Err(Fault::Peer(
                Refusal::Protocol,
                "a payload came alone for which there is no place".into(),
            ));
        }
        match r.opcode {
            Opcode::Send => {
                if self.rules.posted_receives {
                    return self.place_in_buffer(r, placed, sequence, site);
                }
                if self.shown - self.consumed >= 1 << self.rules.rx_log {
                    return Err(Fault::Overrun("no receive was granted for this message".into()));
                }
                if !self.copying.is_empty() {
                    return Ok(Action::Wait);
                }
                if r.has(Record::INLINE) {
                    self.shown += 1;
                    return Ok(Action::ShowWords);
                }
                self.place_at_hand(r, sequence, site)
            }
            Opcode::Put => {
                let to =
                    site.region(r.rkey, r.remote_offset, r.length).map_err(|e| peer(Refusal::Target, e))?;
                let with_signal = r.has(Record::WITH_SIGNAL);
                if with_signal && r.signal >= self.rules.signals {
                    return Err(Fault::Peer(Refusal::Signal, "signal out of range".into()));
                }
                if !placed {
                    let to = Destination::Region { key: r.rkey, stretch: to };
                    return self.begin(r, sequence, Landed::Region, to, site);
                }
                if self.written(r.rkey, site)? {
                    return Ok(Action::Placed(
                        to,
                        if with_signal { Finish::Signal } else { Finish::Nothing },
                    ));
                }
                Ok(Action::Wait)
            }
            Opcode::Signal => {
                if r.signal >= self.rules.signals {
                    return Err(Fault::Peer(Refusal::Signal, "signal out of range".into()));
                }
                if !self.copying.is_empty() {
                    return Ok(Action::Wait);
                }
                Ok(Action::Finish(Finish::Signal))
            }
            Opcode::Nop => unreachable!("`accept` refuses it"),
        }
    }

    /// The link says that it has written to region `key`: whether it could have, and whether that may be shown now.
    fn written<S: Site>(&self, key: u32, site: &S) -> Result<bool, Fault> {
        if !site.offers(key) {
            return Err(Fault::Peer(
                Refusal::Protocol,
                "it wrote to a region that was not offered to its device".into(),
            ));
        }
        Ok(self.copying.is_empty())
    }

    /// A SEND without posted receives whose payload lies with the sender: shown where it lies, or copied to the
    /// landing ring.
    fn place_at_hand<S: Site>(&mut self, r: &Record, sequence: u64, site: &S) -> Result<Action, Fault> {
        self.payload(r, site)?;
        let units = r.length.div_ceil(abi::PUSHGATE_UNIT) as u64;
        let room = self.landing.room(units);
        let held = r.units() as u64;
        // While nothing is held a payload of any size stays in place: that costs the sender nothing that the message
        // does not cost already.
        let much = self.in_place_units > 0 && self.in_place_units + held > self.rules.in_place;
        let readable = site.reads_in_place() && !r.has(Record::REGION);
        if readable && !(much && self.slow && room.is_ok()) {
            self.in_place.push_back(Held { rx: self.shown, sequence, units: held });
            self.in_place_units += held;
            self.shown += 1;
            return Ok(Action::Finish(Finish::Show(Record { flags: 0, ..*r })));
        }
        match room {
            Ok(room) => {
                self.landing.take(room);
                self.begin(r, sequence, Landed::Landing(room), Destination::Landing(room.unit), site)
            }
            // The reader will give room back.
            Err(NoRoom::Now) => Ok(Action::Wait),
            Err(NoRoom::Ever) => {
                let size = self.landing.units() << abi::PUSHGATE_UNIT_LOG;
                let why = format!("{} bytes do not fit the landing ring of {size} bytes", r.length);
                Err(Fault::Peer(Refusal::Long(None), why.into()))
            }
        }
    }

    /// A SEND takes the oldest posted receive whose tag is the SEND's or any.
    fn place_in_buffer<S: Site>(
        &mut self,
        r: &Record,
        placed: bool,
        sequence: u64,
        site: &S,
    ) -> Result<Action, Fault> {
        if self.posted.is_empty() && self.rules.ahead == 0 {
            return Err(Fault::Overrun("no receive was posted for this message".into()));
        }
        let found = self.posted.find(r.tag).copied();
        // What the peer says is compared, never followed.
        if placed && found.is_none_or(|b| b.number as u32 != r.place) {
            let why = format!("it wrote to receive {}, which is not the one that its message takes", r.place);
            return Err(Fault::Peer(Refusal::Protocol, why.into()));
        }
        let Some(b) = found else {
            // A credit says that there is a receive and not which, or that the SEND may come before its receive. The program
            // has the rest of the queue pair's life to post the right one. Those after it wait with the link.
            return Ok(Action::Wait);
        };
        if b.length < r.length {
            // As with RDMA the sender is the one that asked for what can't be done.
            return Err(Fault::Peer(
                Refusal::Long(Lengths::of(r.length, b.length)),
                format!(
                    "{} bytes arrived for receive {}, which takes {}: post a longer one, or send less",
                    r.length, b.number, b.length
                )
                .into(),
            ));
        }
        let to = site.region(b.key, b.offset, r.length).map_err(|e| device(Refusal::Receive, e))?;
        let step = match placed {
            false => {
                let to = Destination::Region { key: b.key, stretch: to };
                self.begin(r, sequence, Landed::Buffer(b), to, site)?
            }
            true if self.written(b.key, site)? => {
                self.shown += 1;
                Action::Placed(to, Finish::Show(in_buffer(r, b.number)))
            }
            true => Action::Wait,
        };
        if step != Action::Wait {
            self.posted.take(r.tag);
        }
        Ok(step)
    }

    /// Where the payload of a record lies.
    fn payload<S: Site>(&self, r: &Record, site: &S) -> Result<Payload, Fault> {
        if r.has(Record::INLINE) {
            return Ok(Payload::Inline);
        }
        if r.has(Record::REGION) {
            return match site.reads_peer() {
                true => Ok(Payload::Peer(r.place_offset)),
                false => Err(Fault::Peer(
                    Refusal::Protocol,
                    "it sent out of a region, which we had not said we can read".into(),
                )),
            };
        }
        let (unit, units) = (r.place, r.units());
        if (units as u64) * (abi::PUSHGATE_UNIT as u64) < r.length as u64 {
            return Err(Fault::Peer(
                Refusal::Protocol,
                format!("{} bytes in {units} units", r.length).into(),
            ));
        }
        let lies = site.payload(unit, units).map(Payload::Mapped);
        lies.ok_or_else(|| {
            Fault::Peer(
                Refusal::Protocol,
                format!("unit {unit} and {units} more leave the peer's window").into(),
            )
        })
    }

    /// Begins a copy, or answers that the message waits: copies out of mapped memory into a device's are queued after
    /// each other, and every other copy is alone.
    fn begin<S: Site>(
        &mut self,
        r: &Record,
        sequence: u64,
        landed: Landed,
        to: Destination,
        site: &S,
    ) -> Result<Action, Fault> {
        let from = self.payload(r, site)?;
        let on_device = matches!(to, Destination::Region { stretch: Stretch::Device(_), .. });
        let of_peer = matches!(from, Payload::Peer(_));
        let queues = on_device && !of_peer;
        let stage = self.landing.longest_free();
        if !self.copying.is_empty() && !queues || on_device && of_peer && stage.1 == 0 {
            return Ok(Action::Wait);
        }
        self.copying.push_back(Copying { record: *r, sequence, landed, queues });
        Ok(Action::Copy { from, to, stage })
    }
}
