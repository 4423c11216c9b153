//! P4Runtime, spoken to one switch: each call with a deadline, each answer bounded.

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use paatp_common::limits::{MAX_JOBS, MAX_RANKS};
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use super::error::SwitchError;
use super::messages::google::rpc;
use super::messages::p4::config::v1::P4Info;
use super::messages::p4::v1::p4_runtime_client::P4RuntimeClient;
use super::messages::p4::v1::{
    Entity, Error as UpdateError, ForwardingPipelineConfig, GetForwardingPipelineConfigRequest,
    MasterArbitrationUpdate, ReadRequest, SetForwardingPipelineConfigRequest, StreamMessageRequest,
    StreamMessageResponse, Uint128, Update, WriteRequest, forwarding_pipeline_config,
    get_forwarding_pipeline_config_request, set_forwarding_pipeline_config_request, stream_message_request,
    stream_message_response, update,
};
use super::plan::{self, Kind, State};
use super::program::Program;

/// Longest wait for one answer. A switch's agent answers within milliseconds; this one may be on a busy machine.
pub const CALL_TIME: Duration = Duration::from_secs(3);
/// Longest wait for a program to be loaded: hardware is set up anew.
pub const LOAD_TIME: Duration = Duration::from_secs(60);
/// Changes in one request. What a switch says of each comes in a trailer: some 100 bytes each, where HTTP/2 servers send 16
/// KiB at least.
pub const CHANGES_AT_A_TIME: usize = 64;
/// Largest trailer that is taken, in bytes.
const MAX_TRAILER_BYTES: u32 = 1 << 20;
/// Most entries that are read: what our tables hold, twice, with groups and others' stations.
pub const MAX_ENTITIES: usize = 2 * (2 * MAX_JOBS * MAX_RANKS + 2 * MAX_JOBS + 1024);
/// Requests of the session that wait to be sent: one is.
const SESSION_REQUESTS: usize = 1;
/// gRPC's code for what went well.
const OK: i32 = Code::Ok as i32;

/// Waits for an answer.
async fn within<T>(
    limit: Duration,
    what: &'static str,
    answer: impl Future<Output = Result<T, Status>>,
) -> Result<T, SwitchError> {
    match tokio::time::timeout(limit, answer).await {
        Err(_) => Err(SwitchError::Silent { what, limit }),
        Ok(answer) => answer.map_err(|status| SwitchError::Refused { what, why: in_words(&status) }),
    }
}

fn in_words(status: &Status) -> String {
    match status.message() {
        "" => status.code().to_string(),
        message => format!("{} ({message})", status.code()),
    }
}

/// A number that says which controller is primary: the largest. Those of one daemon rise, and are larger than those of
/// daemons that started before it.
#[must_use]
pub const fn election(number: u128) -> Uint128 {
    Uint128 { high: (number >> 64) as u64, low: number as u64 }
}

/// The other way round.
#[must_use]
pub fn election_number(id: Option<&Uint128>) -> u128 {
    id.map_or(0, |id| u128::from(id.high) << 64 | u128::from(id.low))
}

/// Who is primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arbitration {
    /// This one.
    Primary,
    /// Another one, with this number.
    Other(u128),
    /// Nobody any more; the last one had this number.
    Nobody(u128),
}

impl Arbitration {
    /// What it means to one that is not primary, with this number.
    const fn error(self, own: u128) -> SwitchError {
        match self {
            Arbitration::Nobody(last) => SwitchError::Vacant { last },
            Arbitration::Other(primary) => SwitchError::NotPrimary { primary, own },
            Arbitration::Primary => SwitchError::Ended,
        }
    }
}

/// A session: it lasts as long as its stream.
pub struct Client {
    rpc: P4RuntimeClient<Channel>,
    device: u64,
    election: u128,
    /// Keeps the stream open.
    _requests: mpsc::Sender<StreamMessageRequest>,
    messages: Streaming<StreamMessageResponse>,
}

impl Client {
    /// Opens a session with this number.
    ///
    /// # Errors
    /// If the switch cannot be reached, does not answer, or has another controller.
    pub async fn open(address: SocketAddr, device: u64, election: u128) -> Result<Client, SwitchError> {
        let mut rpc = connect(address).await?;
        let (requests, stream) = mpsc::channel(SESSION_REQUESTS);
        let update = MasterArbitrationUpdate {
            device_id: device,
            election_id: Some(self::election(election)),
            ..MasterArbitrationUpdate::default()
        };
        let update = stream_message_request::Update::Arbitration(update);
        // There is room for one.
        let _ = requests.try_send(StreamMessageRequest { update: Some(update) });
        let what = "open a session";
        let opened = within(CALL_TIME, what, rpc.stream_channel(ReceiverStream::new(stream))).await?;
        let mut client = Client { rpc, device, election, _requests: requests, messages: opened.into_inner() };
        match within(CALL_TIME, what, client.arbitration_or_status()).await? {
            Arbitration::Primary => Ok(client),
            other => Err(other.error(election)),
        }
    }

    /// Waits until the switch says who is primary. Everything else that it says on the session is passed over.
    async fn arbitration_or_status(&mut self) -> Result<Arbitration, Status> {
        loop {
            let message = self.messages.message().await?;
            let Some(message) = message else { return Err(Status::aborted("it ended the session")) };
            let Some(stream_message_response::Update::Arbitration(update)) = message.update else { continue };
            let primary = election_number(update.election_id.as_ref());
            let code = update.status.map_or(OK, |status| status.code);
            return Ok(if code == OK {
                Arbitration::Primary
            } else if code == Code::NotFound as i32 {
                Arbitration::Nobody(primary)
            } else {
                Arbitration::Other(primary)
            });
        }
    }

    /// Waits for the end of being primary: returns only then. May be dropped and called again.
    pub async fn lost(&mut self) -> SwitchError {
        loop {
            match self.arbitration_or_status().await {
                Ok(Arbitration::Primary) => {}
                Ok(other) => return other.error(self.election),
                Err(_) => return SwitchError::Ended,
            }
        }
    }

    /// The program that the switch has, and its cookie.
    ///
    /// # Errors
    /// If it has none or does not answer.
    pub async fn program(&mut self) -> Result<(P4Info, u64), SwitchError> {
        program(&mut self.rpc, self.device).await
    }

    /// Loads a program into the switch.
    ///
    /// # Errors
    /// If it refuses or does not answer.
    pub async fn load(&mut self, info: P4Info, program: Vec<u8>, cookie: u64) -> Result<(), SwitchError> {
        let config = ForwardingPipelineConfig {
            p4info: Some(info),
            p4_device_config: program,
            cookie: Some(forwarding_pipeline_config::Cookie { cookie }),
        };
        let request = SetForwardingPipelineConfigRequest {
            device_id: self.device,
            election_id: Some(election(self.election)),
            action: set_forwarding_pipeline_config_request::Action::VerifyAndCommit.into(),
            config: Some(config),
            ..SetForwardingPipelineConfigRequest::default()
        };
        let answer = self.rpc.set_forwarding_pipeline_config(request);
        within(LOAD_TIME, "load its program", answer).await.map(drop)
    }

    /// Reads what these ask for.
    ///
    /// # Errors
    /// If the switch refuses, does not answer, or does not end.
    pub async fn read(
        &mut self,
        what: &'static str,
        entities: Vec<Entity>,
    ) -> Result<Vec<Entity>, SwitchError> {
        let request = ReadRequest { device_id: self.device, entities, ..ReadRequest::default() };
        let answers = async {
            let mut answers = self.rpc.read(request).await?.into_inner();
            let mut read = Vec::new();
            while let Some(answer) = answers.message().await? {
                read.extend(answer.entities);
                if read.len() > MAX_ENTITIES {
                    break;
                }
            }
            Ok(read)
        };
        let read = within(CALL_TIME, what, answers).await?;
        if read.len() > MAX_ENTITIES { Err(SwitchError::TooMuch(MAX_ENTITIES)) } else { Ok(read) }
    }

    /// What stands in our tables.
    ///
    /// # Errors
    /// As [`Client::read`].
    pub async fn state(&mut self, program: &Program) -> Result<State, SwitchError> {
        let read = self.read("tell what is in its tables", program.all()).await?;
        Ok(program.state(&read))
    }

    /// Makes changes, in any order. Returns what the switch said of those that it refused.
    ///
    /// # Errors
    /// If it does not answer, or refuses all.
    pub async fn write(
        &mut self,
        program: &Program,
        updates: &[plan::Update],
    ) -> Result<Vec<String>, SwitchError> {
        let mut refused = Vec::new();
        for some in updates.chunks(CHANGES_AT_A_TIME) {
            let change = |change: &plan::Update| Update {
                r#type: match change.kind {
                    Kind::Insert => update::Type::Insert,
                    Kind::Modify => update::Type::Modify,
                    Kind::Delete => update::Type::Delete,
                }
                .into(),
                entity: Some(program.entity(&change.key, &change.value)),
            };
            let request = WriteRequest {
                device_id: self.device,
                election_id: Some(election(self.election)),
                updates: some.iter().map(change).collect(),
                ..WriteRequest::default()
            };
            let what = "change its tables";
            let answer = async {
                match self.rpc.write(request).await {
                    Ok(_) => Ok(Vec::new()),
                    // One answer for each change.
                    Err(status) if !status.details().is_empty() => Ok(refusals(&status, some)),
                    Err(status) => Err(status),
                }
            };
            refused.extend(within(CALL_TIME, what, answer).await?);
        }
        Ok(refused)
    }
}

async fn connect(address: SocketAddr) -> Result<P4RuntimeClient<Channel>, SwitchError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| SwitchError::Unreachable(error.to_string()))?
        .http2_max_header_list_size(MAX_TRAILER_BYTES);
    match tokio::time::timeout(CALL_TIME, endpoint.connect()).await {
        Err(_) => Err(SwitchError::Unreachable(format!("no answer within {CALL_TIME:?}"))),
        Ok(Err(error)) => Err(SwitchError::Unreachable(cause(&error))),
        Ok(Ok(channel)) => Ok(P4RuntimeClient::new(channel)),
    }
}

async fn program(rpc: &mut P4RuntimeClient<Channel>, device_id: u64) -> Result<(P4Info, u64), SwitchError> {
    let response_type = get_forwarding_pipeline_config_request::ResponseType::P4infoAndCookie.into();
    let request = GetForwardingPipelineConfigRequest { device_id, response_type };
    let answer = async {
        match rpc.get_forwarding_pipeline_config(request).await {
            Ok(answer) => Ok(answer.into_inner().config),
            Err(status) if status.code() == Code::FailedPrecondition => Ok(None),
            Err(status) => Err(status),
        }
    };
    let config = within(CALL_TIME, "tell its program", answer).await?.ok_or(SwitchError::NoProgram)?;
    let cookie = config.cookie.map_or(0, |cookie| cookie.cookie);
    Ok((config.p4info.ok_or(SwitchError::NoProgram)?, cookie))
}

/// The program of a switch, asked for without a session: whoever is primary stays so.
///
/// # Errors
/// If the switch cannot be reached, does not answer, or has not our program.
pub async fn look(address: SocketAddr, device: u64) -> Result<Program, SwitchError> {
    let (info, _) = program(&mut connect(address).await?, device).await?;
    Ok(Program::of(&info)?)
}

/// What the switch says of each change that it refused.
fn refusals(status: &Status, updates: &[plan::Update]) -> Vec<String> {
    let details = rpc::Status::decode(status.details()).map(|status| status.details).unwrap_or_default();
    // What cannot be read was no success.
    let unknown = |_| UpdateError { canonical_code: Code::Unknown as i32, ..UpdateError::default() };
    let errors = details.iter().map(|any| UpdateError::decode(&*any.value).unwrap_or_else(unknown));
    let failed = errors.zip(updates).filter(|(error, _)| error.canonical_code != OK);
    let words = |(error, update): (UpdateError, &plan::Update)| {
        let code = Code::from_i32(error.canonical_code);
        format!("{}: {code} ({})", update.in_words(), error.message)
    };
    let told: Vec<String> = failed.map(words).collect();
    // It said that something failed, and not what: then nothing is sure.
    if told.is_empty() { vec![in_words(status); updates.len()] } else { told }
}

/// An error with what is behind it: tonic's own words are "transport error".
fn cause(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}
