//! One run: the request unbroken, the same request with the fault, and what was measured.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::lead::{self, Ours};
use super::plan::{Draw, Fault, Moment, Place, Trial};
use super::report::{Row, Trace};
use super::strike::{Aim, Cut, Hops, Strike};
use super::watch::{Heal, Member, Ring, Stream};
use crate::cli::client::Client;
use crate::cli::console::Failure;
use crate::clock;

/// For a ring to be ready, a moment to come, a stream to end.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
/// For a fault to be seen, from when the stream has ended on.
const DETECT_WAIT: Duration = Duration::from_secs(15);
/// How long a stream is read on where its coordinator is gone.
const READ_ON: Duration = Duration::from_secs(30);
/// Pause between two looks at the ring.
pub(crate) const LOOK: Duration = Duration::from_millis(5);
/// Pause between two looks while a moment that is soon over is waited for.
const SHORT_LOOK: Duration = Duration::from_millis(1);
/// The phase of what was not done, and not begun.
pub(crate) const REFUSED: &str = "refused";
/// Characters of a prompt that takes a while to compute.
const LONG_PROMPT: usize = 2_400;

/// How prompts begin.
const PROMPTS: [&str; 4] = [
    "And it came to pass in those days, that ",
    "It was a truth universally known in the neighbourhood, that ",
    "And the LORD spake unto Moses, saying, ",
    "She had been reading for an hour when ",
];

/// Where faults strike.
#[derive(Debug, Clone)]
pub(crate) struct Arena {
    pub(crate) client: Client,
    pub(crate) hops: Hops,
    /// Files with READY lines.
    pub(crate) ready: Vec<PathBuf>,
    /// Stages that the ring must have before anything strikes, spares included.
    pub(crate) members: usize,
    pub(crate) max_new: u32,
    /// Which way hops are cut; `None`: drawn.
    pub(crate) way: Option<Cut>,
    /// The coordinator, where this command started it.
    pub(crate) ours: Option<Ours>,
    /// Becomes `true` when the command is to end.
    pub(crate) stop: Arc<AtomicBool>,
}

/// What a run gave.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) row: Row,
    pub(crate) trace: Trace,
    /// The stage that was struck, for a person.
    pub(crate) whom: String,
    /// What should not have happened besides other ids.
    pub(crate) problems: Vec<String>,
}

/// Whom to strike: the stage, whether the hop into it is the coordinator's, and the stage that dies first.
struct Victims {
    victim: Member,
    first: bool,
    opening: Option<Member>,
}

impl Arena {
    /// Looks at the ring.
    pub(crate) fn ring(&self) -> Result<Ring, Failure> {
        if self.stop.load(Ordering::Acquire) {
            return Err(crate::cli::ring::interrupted());
        }
        Ok(self.client.get("/ring")?)
    }

    /// Looks at the ring until `seen` gives something.
    fn until<T>(&self, what: &str, look: Duration, mut seen: impl FnMut(&Ring) -> Option<T>) -> Result<T, Failure> {
        let begun = clock::now();
        loop {
            if let Some(seen) = seen(&self.ring()?) {
                return Ok(seen);
            }
            if clock::now() - begun > PATIENCE {
                let why = format!("{what}: not within {} s", PATIENCE.as_secs());
                return Err(Failure::new("churn", why));
            }
            std::thread::sleep(look);
        }
    }

    /// Waits until the ring serves and every stage is there.
    pub(crate) fn settled(&self) -> Result<Ring, Failure> {
        self.until("the ring is ready", LOOK, |ring| {
            let there = ring.members.iter().filter(|member| member.alive).count() >= self.members;
            let healed = ring.heals.iter().all(|heal| heal.rebuilt_ms.is_some());
            (ring.ready && there && healed && ring.sessions == 0).then(|| ring.clone())
        })
    }

    /// The local time of the coordinator's start.
    pub(crate) fn zero(&self) -> Result<Instant, Failure> {
        let before = clock::now();
        let ring = self.ring()?;
        let middle = before + (clock::now() - before) / 2;
        let up = Duration::from_millis(ring.uptime_ms) + Duration::from_micros(500);
        Ok(middle.checked_sub(up).unwrap_or(middle))
    }

    pub(crate) fn stream(&self, body: &Value) -> Stream {
        let patience = if self.ours.is_some() { READ_ON } else { Duration::ZERO };
        Stream::start(self.client.clone(), body.clone(), patience)
    }

    /// Waits for a stream's end.
    pub(crate) fn ended(&self, stream: &Stream) -> Result<Result<Vec<Value>, String>, Failure> {
        self.until("the stream ends", LOOK, |_| stream.end())
    }
}

/// Does one run.
///
/// # Errors
/// Why it can't be done, or was not done to its end.
pub(crate) fn run(arena: &Arena, trial: Trial) -> Result<Outcome, Failure> {
    if trial.fault == Fault::Coordinator {
        return lead::run(arena, trial);
    }
    let mut draw = Draw::new(trial.seed);
    let body = request(&mut draw, trial.moment, arena.max_new);
    let way = arena.way.or_else(|| draw.pick(&Cut::ALL)).unwrap_or(Cut::Both);
    let ring = arena.settled()?;
    let victims = choose(&ring, trial, &mut draw)?;
    let take = |fault, member: &Member, first| {
        Aim::take(fault, way, (member, first), &arena.hops, &arena.ready).map_err(Failure::of(REFUSED))
    };
    let aim = take(trial.fault, &victims.victim, victims.first)?;
    let opening = victims.opening.as_ref().map(|member| take(Fault::Kill, member, false)).transpose()?;
    let whom = format!("stage {} ({})", victims.victim.range, aim.describe());
    let unbroken = arena.stream(&body);
    let reference = arena.ended(&unbroken)?.map_err(|why| Failure::new("churn", format!("the unbroken run: {why}")))?;
    arena.settled()?;
    let mut run = Run::new(arena, trial, victims.victim.peer)?;
    let stream = if trial.moment == Moment::Idle {
        run.strike(aim)?;
        run.follow(None)?;
        run.arena.until("the ring is ready", LOOK, |ring| ring.ready.then_some(()))?;
        let stream = arena.stream(&body);
        run.follow(Some(&stream))?;
        stream
    } else {
        let stream = arena.stream(&body);
        run.wait(&stream, opening, &mut draw)?;
        run.strike(aim)?;
        run.follow(Some(&stream))?;
        stream
    };
    let ids = arena.ended(&stream)?;
    run.outcome(&stream, (&unbroken, &reference), ids, whom)
}

/// Breaks that were there before.
fn known(ring: &Ring) -> BTreeSet<(u64, String)> {
    ring.heals.iter().map(|heal| (heal.detected_ms, heal.peer.clone())).collect()
}

fn news<'a>(ring: &'a Ring, known: &BTreeSet<(u64, String)>) -> Vec<&'a Heal> {
    ring.heals.iter().filter(|heal| !known.contains(&(heal.detected_ms, heal.peer.clone()))).collect()
}

/// A request whose answer is the same each time.
pub(crate) fn request(draw: &mut Draw, moment: Moment, max_new: u32) -> Value {
    let prompt = draw.pick(&PROMPTS).unwrap_or_default();
    let prompt =
        if moment == Moment::Prefill { prompt.repeat(LONG_PROMPT / prompt.len().max(1)) } else { prompt.to_owned() };
    let temperature = draw.pick(&[0.0, 0.8]);
    json!({
        "prompt": prompt.trim_end(), "max_tokens": max_new, "temperature": temperature, "seed": draw.next() >> 1,
        "ignore_eos": true, "return_token_ids": true, "stream": true,
    })
}

/// Whom a trial strikes on the ring as it stands.
fn choose(ring: &Ring, trial: Trial, draw: &mut Draw) -> Result<Victims, Failure> {
    let refuse = |why: String| Failure::new(REFUSED, why);
    let (serving, waiting) = (ring.serving(), ring.waiting());
    let last = serving.len().saturating_sub(1);
    let mut places = vec![Place::Head, Place::Tail];
    places.extend((last >= 2).then_some(Place::Middle));
    places.extend((!waiting.is_empty()).then_some(Place::Spare));
    let place = if trial.place == Place::Random { draw.pick(&places).unwrap_or(Place::Head) } else { trial.place };
    let found = match place {
        Place::Head | Place::Random => serving.first(),
        Place::Tail => serving.last(),
        Place::Middle if last >= 2 => serving.get(1 + draw.below(last - 1)),
        Place::Middle => None,
        Place::Spare => {
            // While a ring heals, a spare of which there are two may die as it takes its place.
            let twin = |one: &&&Member| waiting.iter().any(|other| other.range == one.range && other.peer != one.peer);
            let twins: Vec<&&Member> = waiting.iter().filter(twin).collect();
            let of = if trial.moment == Moment::Heal && !twins.is_empty() { twins } else { waiting.iter().collect() };
            draw.pick(&of)
        }
    };
    let victim = found.ok_or_else(|| refuse(format!("--place {place}: this ring of {} has none", serving.len())))?;
    let replaced = |member: &Member, but: &str| {
        waiting.iter().any(|spare| spare.range == member.range && spare.peer != member.peer && spare.peer != but)
    };
    let stays = trial.fault == Fault::Slow || place == Place::Spare;
    if !stays && !replaced(victim, "") {
        return Err(refuse(format!(
            "nobody waits for the place of stage {0}: the stream would not go on; start `stage --range {0} --spare`",
            victim.range
        )));
    }
    let opening = if trial.moment == Moment::Heal {
        let others = serving.iter().filter(|one| one.peer != victim.peer && replaced(one, &victim.peer));
        let others: Vec<&&Member> = others.collect();
        let same: Vec<&&Member> = others.iter().copied().filter(|one| one.range == victim.range).collect();
        let one = draw.pick(if same.is_empty() { &others } else { &same });
        let why = "--moment heal: it takes the death of another stage, and no spare waits for one";
        Some((**one.ok_or_else(|| refuse(why.to_owned()))?).clone())
    } else {
        None
    };
    let first = matches!(place, Place::Head | Place::Spare);
    Ok(Victims { victim: (*victim).clone(), first, opening })
}

/// A run under way.
pub(crate) struct Run<'a> {
    arena: &'a Arena,
    trial: Trial,
    /// Start of the coordinator's clock.
    pub(crate) zero: Instant,
    /// Breaks before the run.
    before: BTreeSet<(u64, String)>,
    /// Breaks before the fault.
    known: BTreeSet<(u64, String)>,
    victim: String,
    /// When the fault was seen, and in which words.
    pub(crate) detected: Option<(Instant, String)>,
    strike: Option<Strike>,
    /// When it struck.
    pub(crate) at: Instant,
}

impl<'a> Run<'a> {
    /// A run that has not struck yet.
    pub(crate) fn new(arena: &'a Arena, trial: Trial, victim: String) -> Result<Self, Failure> {
        let (zero, known) = (arena.zero()?, known(&arena.ring()?));
        let before = known.clone();
        Ok(Self { arena, trial, zero, before, known, victim, detected: None, strike: None, at: zero })
    }

    /// Waits for the moment.
    pub(crate) fn wait(&mut self, stream: &Stream, opening: Option<Aim>, draw: &mut Draw) -> Result<(), Failure> {
        let arena = self.arena;
        let some = 8 + draw.below(16) as u64;
        let over = |stream: &Stream| stream.end().is_some();
        if self.trial.moment == Moment::Prefill {
            return arena.until("the prompt is computed", SHORT_LOOK, |ring| {
                ((ring.sessions > 0 && ring.in_flight > 0) || over(stream)).then_some(())
            });
        }
        let before = arena.until("tokens come", SHORT_LOOK, |ring| {
            ((stream.tokens() >= some && ring.in_flight > 0) || over(stream)).then_some(ring.rejections)
        })?;
        if self.trial.moment == Moment::Correction {
            return arena.until("a draft is rejected", SHORT_LOOK, |ring| {
                (ring.rejections != before || over(stream)).then_some(())
            });
        }
        if let Some(opening) = opening {
            let early = draw.below(2) == 0;
            drop(opening.strike().map_err(Failure::of("churn"))?);
            let mut seen = arena.until("the death is seen", SHORT_LOOK, |ring| {
                let over = over(stream);
                let news = news(ring, &self.known);
                let now = news.last().is_some_and(|heal| early || heal.whole_ms.is_some());
                (now || over).then(|| known(ring))
            })?;
            std::mem::swap(&mut self.known, &mut seen);
        }
        Ok(())
    }

    fn strike(&mut self, aim: Aim) -> Result<(), Failure> {
        let strike = aim.strike().map_err(Failure::of("churn"))?;
        self.at = strike.at;
        self.strike = Some(strike);
        Ok(())
    }

    /// Watches until the fault is seen and the stream, where there is one, has ended.
    fn follow(&mut self, stream: Option<&Stream>) -> Result<(), Failure> {
        let arena = self.arena;
        let mut ended = None;
        let mut tokens = None;
        arena.until("the run ends", LOOK, |ring| {
            self.look(ring);
            let now = clock::now();
            let healed = ring.heals.iter().all(|heal| heal.rebuilt_ms.is_some());
            if let (Some(stream), Some(_), true) = (stream, &self.detected, healed) {
                // A frozen stage comes back under the stream that went on without it.
                let before = *tokens.get_or_insert_with(|| stream.tokens());
                if self.trial.fault == Fault::Freeze && stream.tokens() > before {
                    self.strike = None;
                }
            }
            if stream.is_none_or(|stream| stream.end().is_some()) {
                let since = *ended.get_or_insert(now);
                let waited = now - since.max(self.at) > DETECT_WAIT;
                return (self.detected.is_some() || waited).then_some(());
            }
            None
        })
    }

    /// Whether the ring shows that it saw the fault.
    fn look(&mut self, ring: &Ring) {
        if self.detected.is_some() {
            return;
        }
        let slow = self.trial.fault == Fault::Slow;
        let member = ring.member(&self.victim);
        self.detected = match (news(ring, &self.known).first(), member) {
            (Some(heal), _) if !slow => {
                Some((self.zero + Duration::from_millis(heal.detected_ms), heal.reason.clone()))
            }
            (_, None) => Some((clock::now(), "it is gone".to_owned())),
            (_, Some(member)) if slow && !member.alive => Some((clock::now(), "it is suspected".to_owned())),
            _ => None,
        };
    }

    pub(crate) fn outcome(
        mut self,
        stream: &Stream,
        (unbroken, reference): (&Stream, &[Value]),
        ids: Result<Vec<Value>, String>,
        whom: String,
    ) -> Result<Outcome, Failure> {
        self.strike = None;
        let ring = self.arena.ring()?;
        let heals = news(&ring, &self.before);
        let bytes = heals.iter().map(|heal| heal.replayed_bytes).sum();
        let from = heals.iter().map(|heal| heal.detected_ms).min();
        let to = heals.iter().filter_map(|heal| heal.rebuilt_ms).max();
        let rebuild = from.zip(to).map_or(0, |(from, to)| to.saturating_sub(from));
        let mut problems = Vec::new();
        if self.trial.fault == Fault::Slow {
            let broken = news(&ring, &self.known).into_iter();
            problems.extend(broken.map(|heal| format!("the ring broke over a slow stage: {}", heal.reason)));
        }
        if self.detected.is_none() {
            problems.push(format!("the fault was not seen within {} s", DETECT_WAIT.as_secs()));
        }
        problems.extend(ids.as_ref().err().map(|why| format!("the stream: {why}")));
        let detect = self.detected.as_ref().map(|(at, _)| at.saturating_duration_since(self.at));
        let row = Row {
            fault: self.trial.fault.to_string(),
            place: self.trial.place.to_string(),
            moment: self.trial.moment.to_string(),
            // What was seen within a millisecond was seen all the same.
            detect_ms: detect.map_or(0, |time| millis(time).max(1)),
            rebuild_ms: if bytes > 0 { rebuild } else { 0 },
            rebuild_bytes: bytes,
            stall_ms: millis(stream.stall()),
            ids_equal: ids.is_ok_and(|ids| ids == reference),
        };
        let local = |ms: u64| self.zero + Duration::from_millis(ms);
        let trace = Trace::new(
            (stream, unbroken),
            self.at,
            self.detected.map(|(at, _)| at),
            to.filter(|_| bytes > 0).map(local),
        );
        Ok(Outcome { row, trace, whom, problems })
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
