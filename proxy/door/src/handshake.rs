//! The proof that both ends of a connection know one secret: a state machine without I/O and clock.
//!
//! A hello is 64 bytes: "PUSHGATE", the version, the length of the rest, 48 (32 bits each), flags (32 bits), the purpose (12
//! bytes), 32 random bytes. Numbers are little-endian. A proof is HMAC-SHA256(secret, role | dialer's hello | listener's hello |
//! binding): 16 bytes say whose proof it is, and the binding is what both ends know of the encryption, or zeros.

use ring::hmac;

use super::crowd::Heard;
use super::secret::random;
use super::{Purpose, Terms};

/// The bytes of a hello.
pub const HELLO: usize = 64;
/// The bytes of a proof.
pub const PROOF: usize = 32;
/// The version of what two ends say to each other at the door. Lower numbers are those of greetings that came without a proof; such
/// an end reads the version from the place where it is here, and says that the two do not fit.
pub const VERSION: u32 = 5;

const MAGIC: [u8; 8] = *b"PUSHGATE";
const HEADER: usize = 16;
const FLAGS: std::ops::Range<usize> = 16..20;
const PURPOSE: std::ops::Range<usize> = 20..32;
const NONCE: std::ops::Range<usize> = 32..64;

/// The connection is encrypted.
const TLS: u32 = 1;
/// The sender's secret is one that everybody knows.
const PUBLIC: u32 = 2;

/// Whose proof it is. The first is the dialer's before the encryption.
const EARLY: &[u8; 16] = b"dialer, in clear";
const DIALER: &[u8; 16] = b"dialer\0\0\0\0\0\0\0\0\0\0";
const LISTENER: &[u8; 16] = b"listener\0\0\0\0\0\0\0\0";

/// Why a connection does not come through the door.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// The other end speaks something else.
    #[error("it does not speak pushgate's protocol")]
    Foreign,
    /// The other end is of another release.
    #[error("its wire version is {0}, expected {VERSION}: run one release of pushgate on all hosts")]
    Version(u32),
    /// The connection is for something else there.
    #[error("it is for {theirs}, expected {ours}: look at the address that was dialled")]
    Purpose {
        /// This end's.
        ours: Purpose,
        /// The other end's purpose.
        theirs: Purpose,
    },
    /// One end alone encrypts.
    #[error("{}: set tls (PUSHGATE_TLS) alike on all hosts", if *here { "this end asks for TLS, and the other end does not" } else { "the other end asks for TLS, and this end does not" })]
    Tls {
        /// This end does.
        here: bool,
    },
    /// One end alone has a secret.
    #[error("{}: set one secret on all hosts (secret-file or PUSHGATE_SECRET)", if *here { "this end has a secret, and the other end has none" } else { "the other end has a secret, and this end has none" })]
    Secret {
        /// This end does.
        here: bool,
    },
    /// The other end has repeated what this end says.
    #[error("it repeats what this end says")]
    Reflected,
    /// The proof is wrong.
    #[error("it does not know the secret: set one secret on all hosts (secret-file or PUSHGATE_SECRET)")]
    Proof,
    /// The other end has not taken this end's proof.
    #[error(
        "it closed the connection where it should prove that it knows the secret: do both ends have one secret (secret-file or PUSHGATE_SECRET)? \
         Its log says why, if it is ours"
    )]
    TurnedAway,
    /// The encryption failed.
    #[error("{0}")]
    Encryption(String),
    /// The greeting is too long.
    #[error("its greeting has {bytes} bytes, at most {most} allowed")]
    Greeting {
        /// The length that it says.
        bytes: usize,
        /// The limit.
        most: usize,
    },
    /// The connection ended early.
    #[error("it closed the connection before it had said who it is")]
    Closed,
    /// The connection took too long.
    #[error("it did not say who it is in time")]
    Late,
    /// Others came after this connection, and there are no more places.
    #[error("it did not say who it is before too many others came")]
    Crowded,
    /// The socket failed.
    #[error("{0}")]
    Io(std::io::ErrorKind),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The other end's hello is awaited.
    Hello,
    /// The dialer's proof before the encryption is awaited.
    Early,
    /// The encryption is awaited.
    Tls,
    /// The other end's proof is awaited.
    Proof,
    Proved,
}

/// One end's part of the handshake. Give what arrives to [`Handshake::take`], never more than [`Handshake::wants`], and send what
/// [`Handshake::output`] returns.
pub struct Handshake {
    key: hmac::Key,
    dials: bool,
    tls: bool,
    own: [u8; HELLO],
    other: [u8; HELLO],
    /// The step's bytes so far: of a hello, they are in `other`.
    got: usize,
    proof: [u8; PROOF],
    binding: [u8; 32],
    step: Result<Step, Refused>,
    output: Vec<u8>,
}

impl Handshake {
    /// An end that has said nothing yet. `dials`: it has dialled. Fails if the kernel gives no random bytes.
    pub fn new(terms: &Terms, dials: bool) -> std::io::Result<Handshake> {
        let mut nonce = [0; 32];
        random(&mut nonce)?;
        Ok(Handshake::with_nonce(terms, dials, nonce))
    }

    /// An end with these random bytes. They must not be used twice.
    pub(super) fn with_nonce(terms: &Terms, dials: bool, nonce: [u8; 32]) -> Handshake {
        let mut own = [0; HELLO];
        own[..8].copy_from_slice(&MAGIC);
        own[8..12].copy_from_slice(&VERSION.to_le_bytes());
        own[12..16].copy_from_slice(&((HELLO - HEADER) as u32).to_le_bytes());
        let flags = if terms.tls { TLS } else { 0 } | if terms.secret.is_public() { PUBLIC } else { 0 };
        own[FLAGS].copy_from_slice(&flags.to_le_bytes());
        own[PURPOSE].copy_from_slice(&terms.purpose.0);
        own[NONCE].copy_from_slice(&nonce);
        Handshake {
            key: terms.secret.key(),
            dials,
            tls: terms.tls,
            own,
            other: [0; HELLO],
            got: 0,
            proof: [0; PROOF],
            binding: [0; 32],
            step: Ok(Step::Hello),
            output: if dials { own.to_vec() } else { Vec::new() },
        }
    }

    /// How many bytes of the other end are missing for the next step; 0 where none are read.
    pub fn wants(&self) -> usize {
        match self.step {
            Ok(Step::Hello) => HELLO - self.got,
            Ok(Step::Early | Step::Proof) => PROOF - self.got,
            Ok(Step::Tls | Step::Proved) | Err(_) => 0,
        }
    }

    /// What is to be sent now.
    pub fn output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// Whether the encryption is to begin, and [`Handshake::encrypted`] to be told of its end.
    pub fn awaits_tls(&self) -> bool {
        self.step == Ok(Step::Tls)
    }

    /// Whether this end has proved that it knows the secret, and the other end has not.
    pub(super) fn has_said_all(&self) -> bool {
        self.dials && matches!(self.step, Ok(Step::Tls | Step::Proof))
    }

    /// What the other end, which has dialled, has said so far.
    pub(super) fn heard(&self) -> Heard {
        match self.step {
            Ok(Step::Hello) | Err(_) => Heard::Nothing,
            Ok(Step::Early) => Heard::Hello,
            Ok(Step::Proof) if !self.tls => Heard::Hello,
            Ok(Step::Tls | Step::Proof | Step::Proved) => Heard::Proof,
        }
    }

    /// Whether both ends have proved that they know the secret.
    pub fn is_proved(&self) -> bool {
        self.step == Ok(Step::Proved)
    }

    /// Takes bytes of the other end, of at most the number that [`Handshake::wants`] says. After an error there is nothing more to take;
    /// what [`Handshake::output`] returns then tells the other end why.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), Refused> {
        let step = self.step.clone()?;
        if bytes.len() > self.wants() {
            return self.refuse(Refused::Foreign);
        }
        let to = match step {
            Step::Hello => &mut self.other[self.got..],
            _ => &mut self.proof[self.got..],
        };
        to[..bytes.len()].copy_from_slice(bytes);
        self.got += bytes.len();
        if step == Step::Hello
            && let Err(why) = self.check()
        {
            return self.refuse(why);
        }
        if self.wants() > 0 || bytes.is_empty() {
            return Ok(());
        }
        self.got = 0;
        match step {
            Step::Hello => {
                if !self.dials {
                    self.output.extend(self.own);
                }
                match (self.tls, self.dials) {
                    (true, true) => self.prove(EARLY, Step::Tls),
                    (true, false) => self.step = Ok(Step::Early),
                    (false, true) => self.prove(DIALER, Step::Proof),
                    (false, false) => self.step = Ok(Step::Proof),
                }
            }
            Step::Early => {
                self.verify(EARLY)?;
                self.step = Ok(Step::Tls);
            }
            Step::Proof if self.dials => {
                self.verify(LISTENER)?;
                self.step = Ok(Step::Proved);
            }
            Step::Proof => {
                self.verify(DIALER)?;
                self.prove(LISTENER, Step::Proved);
            }
            Step::Tls | Step::Proved => {}
        }
        Ok(())
    }

    /// The encryption stands, and these bytes are what both ends, and they alone, know of it.
    pub fn encrypted(&mut self, binding: [u8; 32]) {
        if !self.awaits_tls() {
            return;
        }
        self.binding = binding;
        match self.dials {
            true => self.prove(DIALER, Step::Proof),
            false => self.step = Ok(Step::Proof),
        }
    }

    /// Looks at as much of the other end's hello as is there.
    fn check(&mut self) -> Result<(), Refused> {
        let (own, other, got) = (&self.own, &self.other, self.got);
        let word = |hello: &[u8; HELLO], at: usize| {
            u32::from_le_bytes(hello[at..at + 4].try_into().expect("four bytes"))
        };
        let begun = got.min(MAGIC.len());
        if other[..begun] != MAGIC[..begun] {
            return Err(Refused::Foreign);
        }
        if got < HEADER {
            return Ok(());
        }
        let version = word(other, 8);
        let told = !self.dials;
        let why = if version != VERSION {
            Refused::Version(version)
        } else if other[12..HEADER] != own[12..HEADER] {
            return Err(Refused::Foreign);
        } else if got < HELLO {
            return Ok(());
        } else if other[NONCE] == own[NONCE] {
            return Err(Refused::Reflected);
        } else if other[PURPOSE] != own[PURPOSE] {
            let purpose =
                |hello: &[u8; HELLO]| Purpose(hello[PURPOSE].try_into().expect("as long as a purpose"));
            Refused::Purpose { ours: purpose(own), theirs: purpose(other) }
        } else {
            let [ours, theirs] = [own, other].map(|hello| word(hello, FLAGS.start));
            match ours ^ theirs {
                0 => return Ok(()),
                differ if differ & TLS != 0 => Refused::Tls { here: ours & TLS != 0 },
                differ if differ & PUBLIC != 0 => Refused::Secret { here: ours & PUBLIC == 0 },
                _ => return Err(Refused::Foreign),
            }
        };
        // This end's hello tells the other end what differs.
        if told {
            self.output.extend(self.own);
        }
        Err(why)
    }

    fn refuse<T>(&mut self, why: Refused) -> Result<T, Refused> {
        self.step = Err(why.clone());
        Err(why)
    }

    /// What a proof is made over.
    fn transcript(&self, role: &[u8; 16]) -> [u8; 16 + 2 * HELLO + 32] {
        let (dialer, listener) = if self.dials { (&self.own, &self.other) } else { (&self.other, &self.own) };
        // Before the encryption the binding is zeros.
        let mut all = [0; 16 + 2 * HELLO + 32];
        all[..16].copy_from_slice(role);
        all[16..16 + HELLO].copy_from_slice(dialer);
        all[16 + HELLO..16 + 2 * HELLO].copy_from_slice(listener);
        all[16 + 2 * HELLO..].copy_from_slice(&self.binding);
        all
    }

    fn prove(&mut self, role: &[u8; 16], next: Step) {
        self.output.extend(hmac::sign(&self.key, &self.transcript(role)).as_ref());
        self.step = Ok(next);
    }

    fn verify(&mut self, role: &[u8; 16]) -> Result<(), Refused> {
        // Takes the same time however many bytes are right.
        match hmac::verify(&self.key, &self.transcript(role), &self.proof) {
            Ok(()) => Ok(()),
            Err(_) => self.refuse(Refused::Proof),
        }
    }
}
