use paatp_sim::{Scenario, output, report::{self, Outcome, Report}};
use paatp_transport::rate::Algorithm;
fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().unwrap();
    let out = args.next();
    let scenario = Scenario::read(path.as_ref()).unwrap_or_else(|e| panic!("{e}"));
    let mut r = Report::new(path, scenario.seed);
    let mut runs = vec![];
    let t = std::time::Instant::now();
    for a in Algorithm::ALL {
        if let Ok(c) = std::env::var("C") { if !c.split(',').any(|c| c == a.name()) { continue; } }
        match report::run(&scenario, a, scenario.seed) {
            Ok(rec) => { r.controllers.insert(a.name(), Outcome::of(&scenario, &rec)); runs.push((a, rec)); }
            Err(e) => println!("{a}: {e}"),
        }
    }
    println!("{}\n{}{:?}", scenario.description, r.table(), t.elapsed());
    if let Some(out) = out { output::write(out.as_ref(), &scenario, &runs).unwrap(); }
}
