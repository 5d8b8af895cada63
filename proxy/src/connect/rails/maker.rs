//! A thread that makes the links of rails that come back: opening a device, registering memory and freeing links take system
//! calls that an engine's thread must not wait for.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::window::Window;

use crate::link::verbs::{Config, Device, Offer, Places, VerbsError, VerbsOpening, VerbsPrepared};
use crate::link::{OwnRegions, Rail};
use crate::rails::KnownRegion;

/// Opens the device of a rail anew: an earlier one may have been removed.
pub type Reopen = Box<dyn FnMut(usize) -> Result<Arc<Device>, VerbsError> + Send>;
/// Makes memory that a device will register, of a name and so many bytes.
pub type AllocateLater = Box<dyn FnMut(&str, usize) -> Result<SharedMemory, ShimError> + Send>;

/// What the links of a session have in common, and where new ones come from.
pub(super) struct Parts {
    pub(super) reopen: Reopen,
    pub(super) allocate: AllocateLater,
    pub(super) config: Config,
    pub(super) geometry: Geometry,
    pub(super) window: Arc<dyn Window>,
    pub(super) mirror: Arc<SharedMemory>,
    pub(super) peer_geometry: Geometry,
}

/// What the thread does for a rail.
pub(super) enum Job {
    /// Opens the next link.
    Open,
    /// Gets it ready to receive.
    Prepare(Box<VerbsOpening>, Box<Offer>),
    /// Makes the link of what was prepared, which knows these regions.
    Join(Places, Vec<KnownRegion>),
    /// Frees what was prepared, or this link of it.
    Free(Option<Box<dyn Rail>>),
    /// Frees a link that was in use. Has no answer.
    Retire(Box<dyn Rail>),
}

/// What has become of a job.
pub(super) enum Answer {
    Opened(Box<VerbsOpening>),
    /// With the places that the peer is told.
    Prepared(Vec<u8>),
    Joined(Box<dyn Rail>),
    Freed,
    Failed,
}

/// The thread, from the first job on. Dropping it waits until the job under way is done.
pub(super) struct Maker {
    /// Until the first job.
    parts: Option<Parts>,
    running: Option<Running>,
    /// Jobs whose answer has not been taken.
    awaited: usize,
}

struct Running {
    /// `None` once the thread is to end.
    jobs: Option<Sender<(usize, Job)>>,
    answers: Receiver<(usize, Answer)>,
    thread: Option<JoinHandle<()>>,
    /// In the simulator, which has one thread.
    #[cfg(feature = "sim")]
    here: Option<Here>,
}

/// What stands in place of the thread in the simulator.
#[cfg(feature = "sim")]
struct Here {
    jobs: Receiver<(usize, Job)>,
    answers: Sender<(usize, Answer)>,
    shop: Shop,
}

impl Maker {
    pub(super) fn new(parts: Parts) -> Self {
        Maker { parts: Some(parts), running: None, awaited: 0 }
    }

    /// Has the thread do a job. An answer follows.
    pub(super) fn begin(&mut self, rail: usize, job: Job) {
        self.awaited += 1;
        self.hand(rail, job);
    }

    /// Has the thread free a link.
    pub(super) fn retire(&mut self, link: Box<dyn Rail>) {
        self.hand(0, Job::Retire(link));
    }

    fn hand(&mut self, rail: usize, job: Job) {
        if let Some(parts) = self.parts.take() {
            self.running = start(parts).map_err(|e| tracing::warn!("no thread for rails: {e}")).ok();
        }
        // A thread that could not be started answers nothing: the rail stays away.
        if let Some(jobs) = self.running.as_ref().and_then(|running| running.jobs.as_ref()) {
            let _ = jobs.send((rail, job));
        }
    }

    /// A maker that does its jobs when it is asked for an answer.
    #[cfg(feature = "sim")]
    pub(super) fn here(parts: Parts) -> Self {
        let ((jobs, next), (say, answers)) = (channel(), channel());
        let here = Here { jobs: next, answers: say, shop: Shop { parts, prepared: Default::default() } };
        let running = Running { jobs: Some(jobs), answers, thread: None, here: Some(here) };
        Maker { parts: None, running: Some(running), awaited: 0 }
    }

    #[cfg(feature = "sim")]
    fn work_here(&mut self) {
        let Some(here) = self.running.as_mut().and_then(|running| running.here.as_mut()) else { return };
        while let Ok((rail, job)) = here.jobs.try_recv() {
            if let Job::Retire(link) = job {
                drop(link);
            } else {
                let _ = here.answers.send((rail, here.shop.work(rail, job)));
            }
        }
    }

    /// The next answer, and its rail.
    pub(super) fn answer(&mut self) -> Option<(usize, Answer)> {
        // Most calls come while nothing is awaited.
        if self.awaited == 0 {
            return None;
        }
        #[cfg(feature = "sim")]
        self.work_here();
        let answer = self.running.as_ref()?.answers.try_recv().ok()?;
        self.awaited -= 1;
        Some(answer)
    }
}

impl Drop for Maker {
    fn drop(&mut self) {
        if let Some(running) = &mut self.running {
            running.jobs = None;
            // What it registers may be memory that is freed next.
            if let Some(thread) = running.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

fn start(parts: Parts) -> std::io::Result<Running> {
    let (jobs, next) = channel();
    let (say, answers) = channel();
    let thread = std::thread::Builder::new().name("pushgate-rails".into()).spawn(move || {
        let mut shop = Shop { parts, prepared: Default::default() };
        for (rail, job) in next {
            let answer = match job {
                Job::Retire(link) => {
                    drop(link);
                    continue;
                }
                job => shop.work(rail, job),
            };
            if say.send((rail, answer)).is_err() {
                return;
            }
        }
    })?;
    Ok(Running {
        jobs: Some(jobs),
        answers,
        thread: Some(thread),
        #[cfg(feature = "sim")]
        here: None,
    })
}

/// What the thread has.
struct Shop {
    parts: Parts,
    /// By rail.
    prepared: std::collections::BTreeMap<usize, VerbsPrepared>,
}

impl Shop {
    fn work(&mut self, rail: usize, job: Job) -> Answer {
        let done = match job {
            Job::Open => self.open(rail),
            Job::Prepare(opening, offer) => self.prepare(rail, *opening, &offer),
            Job::Join(places, regions) => self.join(rail, places, regions),
            Job::Free(link) => {
                drop((link, self.prepared.remove(&rail)));
                Ok(Answer::Freed)
            }
            Job::Retire(_) => unreachable!("it has no answer"),
        };
        done.unwrap_or_else(|e| {
            tracing::debug!(rail, "the rail's next link: {e}");
            Answer::Failed
        })
    }

    fn open(&mut self, rail: usize) -> Result<Answer, VerbsError> {
        let Parts { reopen, allocate, config, geometry, window, .. } = &mut self.parts;
        let device = reopen(rail)?;
        let opening = VerbsOpening::new(&device, config, *geometry, window.clone(), allocate)?;
        Ok(Answer::Opened(Box::new(opening)))
    }

    fn prepare(&mut self, rail: usize, opening: VerbsOpening, offer: &Offer) -> Result<Answer, VerbsError> {
        let Parts { allocate, mirror, peer_geometry, .. } = &mut self.parts;
        let beside = Some((&*mirror, *peer_geometry));
        let prepared = opening.prepare_beside(beside, peer_geometry.rank, offer, allocate)?;
        let places = serde_json::to_vec(&prepared.places()).expect("places are plain data");
        self.prepared.insert(rail, prepared);
        Ok(Answer::Prepared(places))
    }

    fn join(&mut self, rail: usize, places: Places, regions: Vec<KnownRegion>) -> Result<Answer, VerbsError> {
        let prepared = self.prepared.remove(&rail).expect("a link is prepared before it is joined");
        let mut link = prepared.join(places)?;
        for (key, memory, bytes) in &regions {
            link.add_region(*key, memory, *bytes);
        }
        Ok(Answer::Joined(Box::new(link)))
    }
}
