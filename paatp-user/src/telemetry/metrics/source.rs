//! One part of a scrape, which may fail or hang without holding up the others.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use prometheus::core::{Collector, Desc};
use prometheus::proto::{Counter, Gauge, LabelPair, Metric as Sample, MetricFamily, MetricType};
use tracing::{info, warn};

use super::list::{COLLECTOR_SUCCESS, Kind, Metric};

/// How long a part may take. The largest node needs a twentieth of it; a part that hangs costs it once, then the next scrapes
/// go on without that part at once.
pub const DEADLINE: Duration = Duration::from_millis(400);

/// Samples of one scrape.
#[derive(Debug, Default)]
pub struct Samples(BTreeMap<String, Vec<Sample>>);

impl Samples {
    /// One sample of a metric, with the values of its labels.
    pub fn push(&mut self, metric: &Metric, labels: &[&str], value: f64) {
        debug_assert_eq!(metric.labels.len(), labels.len(), "{}", metric.name);
        let pair = |(name, value): (&&str, &&str)| {
            let mut pair = LabelPair::default();
            pair.set_name((*name).into());
            pair.set_value((*value).into());
            pair
        };
        let mut sample = Sample::from_label(metric.labels.iter().zip(labels).map(pair).collect());
        match metric.kind {
            Kind::Counter => {
                let mut counter = Counter::default();
                counter.set_value(value);
                sample.set_counter(counter);
            }
            Kind::Gauge => {
                let mut gauge = Gauge::default();
                gauge.set_value(value);
                sample.set_gauge(gauge);
            }
        }
        match self.0.get_mut(metric.name.as_ref()) {
            Some(samples) => samples.push(sample),
            None => drop(self.0.insert(metric.name.to_string(), vec![sample])),
        }
    }

    fn family(&mut self, metric: &Metric) -> Option<MetricFamily> {
        let samples = self.0.remove(metric.name.as_ref())?;
        Some(family(metric, samples))
    }
}

fn family(metric: &Metric, samples: Vec<Sample>) -> MetricFamily {
    let mut family = MetricFamily::default();
    family.set_name(metric.name.to_string());
    family.set_help(metric.help.to_string());
    family.set_field_type(match metric.kind {
        Kind::Counter => MetricType::COUNTER,
        Kind::Gauge => MetricType::GAUGE,
    });
    family.set_metric(samples);
    family
}

/// Reads a part: what could be read, and what could not, in words.
pub type Read = dyn Fn(&mut Samples) -> Result<(), String> + Send + Sync;

/// A part of a scrape.
pub struct Source {
    name: &'static str,
    metrics: Vec<Metric>,
    descs: Vec<Desc>,
    read: Arc<Read>,
    /// A thread is still reading for an earlier scrape.
    busy: Arc<AtomicBool>,
    failing: AtomicBool,
}

/// Ends the reading, also where it panics.
struct Turn(Arc<AtomicBool>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Source {
    /// A part called `name` with these metrics.
    ///
    /// # Errors
    /// If a name is none.
    pub fn new(name: &'static str, metrics: Vec<Metric>, read: Arc<Read>) -> prometheus::Result<Source> {
        let mut descs: Vec<Desc> = metrics.iter().map(Metric::desc).collect::<Result<_, _>>()?;
        let label = HashMap::from([("collector".to_owned(), name.to_owned())]);
        let (title, help) = (COLLECTOR_SUCCESS.name.to_string(), COLLECTOR_SUCCESS.help.to_string());
        descs.push(Desc::new(title, help, Vec::new(), label)?);
        Ok(Source { name, metrics, descs, read, busy: Arc::default(), failing: AtomicBool::new(false) })
    }

    /// Reads on a thread of its own: one that hangs is left behind, and no second one is started beside it.
    fn read(&self) -> (Samples, Result<(), String>) {
        if self.busy.swap(true, Ordering::Acquire) {
            return (Samples::default(), Err("an earlier scrape is still waiting for it".into()));
        }
        let (turn, read) = (Turn(self.busy.clone()), self.read.clone());
        let (sender, receiver) = sync_channel(1);
        let reading = move || {
            let mut samples = Samples::default();
            let result = read(&mut samples);
            drop(turn);
            // Whoever waited has given up.
            let _ = sender.send((samples, result));
        };
        if let Err(cause) = std::thread::Builder::new().name(format!("read-{}", self.name)).spawn(reading) {
            return (Samples::default(), Err(format!("no thread: {cause}")));
        }
        receiver.recv_timeout(DEADLINE).unwrap_or_else(|_| {
            (Samples::default(), Err(format!("no answer within {} ms", DEADLINE.as_millis())))
        })
    }
}

impl Collector for Source {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let (mut samples, result) = self.read();
        match &result {
            Err(cause) if !self.failing.swap(true, Ordering::Relaxed) => {
                warn!(collector = self.name, "cannot be read for metrics: {cause}");
            }
            Ok(()) if self.failing.swap(false, Ordering::Relaxed) => {
                info!(collector = self.name, "can be read for metrics again");
            }
            _ => {}
        }
        let mut families: Vec<_> = self.metrics.iter().filter_map(|metric| samples.family(metric)).collect();
        let mut success = Samples::default();
        success.push(&COLLECTOR_SUCCESS, &[self.name], f64::from(u8::from(result.is_ok())));
        families.extend(success.family(&COLLECTOR_SUCCESS));
        families
    }
}
